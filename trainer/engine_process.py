"""The process of an embedded engine. It imports neither store nor endpoint: `serve` is ready when
this is.
"""

from __future__ import annotations

from pathlib import Path

from trainer.beginning import begin
from trainer.devices import check_device
from trainer.errors import StartupError
from trainer.model_folder import check_model
from trainer.run_config import ConfigError
from trainer.start_checks import check_listening


def run_engine(config_file: Path, role: str, overrides: list[str], exit_with_parent: bool) -> None:
    """The embedded engine of `role` ("policy" or "frozen")."""
    if role not in ("policy", "frozen"):
        raise ConfigError(f"--role {role}: must be policy or frozen")
    config = begin(config_file, overrides, exit_with_parent)
    if role == "frozen" and config.frozen.shared:
        raise ConfigError("--role frozen: this run's policy engine is the frozen one too")
    embedded = getattr(config, role).embedded
    if embedded is None:
        raise ConfigError(f"{role}.embedded: this run's {role} engine is not an embedded one")
    if not exit_with_parent:
        check_listening(f"{role}.embedded", embedded.host, embedded.port)
        check_device(f"{role}.embedded.device", embedded.device)
        check_model(embedded.model)
    from rollout_bridge.embedded.errors import UnsupportedModel
    from rollout_bridge.embedded.server import serve

    _ = getattr(config, role).keys  # a key file that cannot be read is a line, not a traceback
    try:
        serve(embedded)
    except UnsupportedModel as error:
        raise StartupError(f"{role}.embedded.model: {error}") from None
