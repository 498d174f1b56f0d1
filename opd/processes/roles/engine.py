"""The process of an embedded engine. It imports neither store nor endpoint, because `serve` waits
for it.
"""

from __future__ import annotations

from pathlib import Path

from opd.models.folder import check_model
from opd.processes.beginning import begin, imported
from opd.run.config import RunConfig
from opd.run.devices import check_device
from opd.run.start_checks import check_listening
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from trainer.errors import ConfigError, StartupError
from trainer.model.model_config import held_dtype


def run_engine(config_file: Path, role: str, overrides: list[str], exit_with_parent: bool) -> None:
    """The embedded engine of `role`: "policy", "frozen", or "NAME.N", one of a teacher's."""
    config = begin(config_file, overrides, exit_with_parent)
    embedded = _settings_of(config, role)
    if not exit_with_parent:
        check_listening(f"{role}.embedded", embedded.host, embedded.port)
        check_device(f"{role}.embedded.device", embedded.device)
        check_model(embedded.model)
    from rollout_bridge.embedded.errors import UnsupportedModel
    from rollout_bridge.embedded.server.server import serve

    imported()
    if role in ("policy", "frozen"):
        _ = getattr(config, role).keys  # an unreadable key file gives a line, not a traceback
        if _rounds_start(config, role):
            embedded = embedded.model_copy(update={"rounds_start": True})
    try:
        serve(embedded)
    except UnsupportedModel as error:
        raise StartupError(f"{role}.embedded.model: {error}") from None


def _settings_of(config: RunConfig, role: str) -> EmbeddedEngineConfig:
    if role not in ("policy", "frozen"):
        name, _, number = role.rpartition(".")
        group = config.teachers.get(name)
        if group is None or not number.isdecimal() or int(number) >= group.replicas:
            raise ConfigError(
                f"--role {role}: must be policy, frozen, or NAME.N for engine N of a teacher that "
                "the run starts"
            )
        return group.engine(int(number))
    if role == "frozen" and config.frozen.shared:
        raise ConfigError("--role frozen: this run's policy engine is the frozen one too")
    embedded = getattr(config, role).embedded
    if embedded is None:
        raise ConfigError(f"{role}.embedded: this run's {role} engine is not an embedded one")
    return embedded


def _rounds_start(config: RunConfig, role: str) -> bool:
    """Whether the trainer holds this engine's start weights in bfloat16."""
    trainer = config.trainer
    is_held = role == "frozen" or trainer.lora is not None
    return is_held and held_dtype(config.model, trainer.base_dtype) == "bfloat16"
