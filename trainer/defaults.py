"""The configuration of a run on one machine: embedded engines, SQLite, everything on loopback.

Plain nested values, laid over by a file and by overrides, then completed with what only the machine
and the model can say: free ports, the context length, the address of the judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer import run_config
from trainer.run import assign_ports
from trainer.run_config import ConfigError, RunConfig

LONGEST_JUDGE_ANSWER = 1024


def single_machine(model: str, folder: Path) -> dict[str, Any]:
    """Policy and frozen engine from `model`, both embedded; store and outputs in `folder`."""
    engine = {"model": model, "port": 0}
    return {
        "model": model,
        "store": {"url": f"sqlite:///{folder.resolve() / 'records.db'}"},
        "policy": {"embedded": dict(engine)},
        "frozen": {"embedded": dict(engine)},
        "judge": {},
        # An engine that died is back after the time that its model takes to load.
        "engine_client": {"attempts": 9},
        # An embedded engine serves its start weights as version 0; the frozen one for ever.
        "scoring": {"expected_version": "0"},
    }


def resolve(values: dict[str, Any], file: Path | None, overrides: list[str]) -> RunConfig:
    """`values`, then the file's, then the overrides; validated and completed.

    Raises ConfigError with one line per wrong key.
    """
    if file is not None:
        values = run_config.merge(values, run_config.read_toml(file))
    values = run_config.merge(values, run_config.parse_overrides(overrides))
    model = str(values["model"])
    length, model_type = model_facts(model)
    values = run_config.merge({"renderer": _renderer(model, model_type, values)}, values)
    values = run_config.merge({"scoring": {"context_length": length}}, values)
    if "url" in values["frozen"]:
        # A server that the run did not start names its weights as it likes: the first name counts.
        values["scoring"].pop("expected_version", None)
    if "base_url" in values["judge"]:
        return assign_ports(run_config.build(values))
    if "model" in values["judge"]:
        raise ConfigError("judge.model: set judge.base_url too, the server that has this model")
    return _judged_by_frozen_engine(values, length)


def _renderer(model: str, model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """The renderer's settings; loading it now turns a model without chat template into one line."""
    from rollout_bridge.config import RendererConfig
    from rollout_bridge.rendering import Rendering
    from trainer.renderer_choice import choose_renderer

    given = values.get("renderer", {})
    try:
        if "name" in given:
            # A wrong key is reported, with the right one, when the whole configuration is checked.
            known = {key: given[key] for key in RendererConfig.model_fields if key in given}
            Rendering.load(model, RendererConfig.model_validate(known))
            return given
        return choose_renderer(model, model_type).model_dump(exclude_none=True)
    except ValueError as error:
        raise ConfigError(f"renderer: {error}") from None


def model_facts(model: str) -> tuple[int, str]:
    """The most tokens that the model takes, and its family, from its own configuration."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model: cannot load '{model}': {reason}") from None
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"model: '{model}' does not say its context length; is it a causal LM?")
    return length, str(config.model_type)


def _judged_by_frozen_engine(values: dict[str, Any], length: int) -> RunConfig:
    answer = values["judge"].get("max_tokens", min(LONGEST_JUDGE_ANSWER, length // 4))
    own = {
        # The port is known only once ports are assigned.
        "base_url": "http://127.0.0.1:0/v1",
        "model": values["model"],
        "max_tokens": answer,
        "max_prompt_tokens": length - answer,
    }
    config = assign_ports(run_config.build(run_config.merge({"judge": own}, values)))
    url = f"{config.frozen.base_url}/v1"
    return config.model_copy(update={"judge": config.judge.model_copy(update={"base_url": url})})
