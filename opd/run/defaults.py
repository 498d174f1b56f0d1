"""The configuration of a run on one machine: embedded engines, SQLite, everything on loopback.

Plain nested values, overridden by a file and by overrides, then completed with what only the
machine and the model determine: free ports, the context length, the address of the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from opd.models.folder import check_model
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from opd.run.config import EngineConfig, RunConfig, TeacherGroup
from trainer.config import trains_all_weights
from trainer.errors import ConfigError
from trainer.model.model_config import config_value, context_length, has_experts, why_not_served

if TYPE_CHECKING:
    from rollout_bridge.rendering.rendering import Rendering

LONGEST_JUDGE_ANSWER = 1024
ENGINE_KEY = "engine.key"
"""The key that the run's own engines require, in its folder; created at the first start."""


def single_machine(model: str, folder: Path) -> dict[str, Any]:
    """Policy and frozen engine from `model`, both embedded; store and outputs in `folder`."""
    engine = {"model": model, "port": 0, "api_key_file": str(folder.resolve() / ENGINE_KEY)}
    return {
        "model": model,
        "store": {"url": f"sqlite:///{folder.resolve() / 'records.db'}"},
        "policy": {"embedded": dict(engine)},
        "frozen": {"embedded": dict(engine)},
        "judge": {},
        # An engine that died is back once its model is loaded again.
        "engine_client": {"attempts": 9},
        # An embedded engine serves its start weights as version 0; the frozen one forever.
        "scoring": {"expected_version": "0"},
    }


def resolve(
    values: dict[str, Any],
    file: Path | None,
    overrides: list[str],
    check: Callable[[RunConfig], None] | None = None,
    recipe: Callable[[int | None, bool], dict[str, Any]] | None = None,
) -> RunConfig:
    """`values`, then the file's, then the overrides; validated and completed. Below all of them is
    the `recipe` for a model of this hidden size (None: not known yet), and for full weights if
    trainer.lora says so.

    Everything that the user wrote is validated, and passed to `check`, before anything of the model
    is read, so that a typing error shows at once. Raises ConfigError with one line per wrong key,
    and what `check` raises.
    """
    values = _with_teachers(_laid_over(values, file, overrides))
    full = _trains_all_weights(values)
    given = _as_given(values if recipe is None else run_config.merge(recipe(None, full), values))
    if check is not None:
        check(given)
    model = given.model
    check_model(model)
    for group in given.teachers.values():
        check_model(group.embedded.model)
        model_facts(group.embedded.model, is_served_here=True)
    renderer = _named_renderer(model, values)
    length, model_type = model_facts(model, is_served_here=_is_served_here(given))
    if renderer is None:
        renderer = _chosen_renderer(model, model_type)
    if recipe is not None:
        values = run_config.merge(recipe(_width(model), full), values)
    values = run_config.merge({"renderer": renderer}, values)
    values = run_config.merge({"scoring": {"context_length": length}}, values)
    if "url" in values["frozen"]:
        # A server that the run did not start names its weights as it likes: the first name counts.
        values["scoring"].pop("expected_version", None)
    if recipe is not None:
        values = _shared_where_possible(values, model)
    if "base_url" in values["judge"]:
        return _assign_ports(run_config.build(values))
    return _judged_by_frozen_engine(values, length)


def _with_teachers(
    values: dict[str, Any], ports_for: Callable[[int], Sequence[int]] = free_ports
) -> dict[str, Any]:
    """The same, with ports for the teachers that the run starts, among those that score.

    Raises ConfigError for a wrong section.
    """
    teachers: dict[str, Any] = {}
    urls: dict[str, Any] = {}
    sections = values.get("teachers", {})
    if not isinstance(sections, dict):
        return values  # the check of the whole names it
    scoring = values.get("scoring", {}).get("teachers", {})
    for name, given in sections.items():
        try:
            group = TeacherGroup.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"teachers.{name}.{place}: {first['msg']}") from None
        if name in scoring and scoring[name] != group.urls:
            raise ConfigError(
                f"scoring.teachers.{name}: the run starts a teacher of this name "
                f"(teachers.{name}): give one of them another name"
            )
        missing = group.replicas - len(group.ports)
        ports = [*group.ports[: group.replicas], *ports_for(max(missing, 0))]
        teachers[name] = {"ports": ports}
        urls[name] = group.model_copy(update={"ports": ports}).urls
    if not teachers:
        return values
    return run_config.merge(values, {"teachers": teachers, "scoring": {"teachers": urls}})


def _laid_over(values: dict[str, Any], file: Path | None, overrides: list[str]) -> dict[str, Any]:
    """`values`, then the file's, then the overrides."""
    if file is not None:
        values = run_config.merge(values, run_config.read_toml(file))
    return run_config.merge(values, run_config.parse_overrides(overrides))


def as_planned(
    model: str,
    file: Path | None,
    overrides: list[str],
    recipe: Callable[[int | None, bool], dict[str, Any]],
) -> RunConfig:
    """What `resolve` would make of a new run of `model`, from its `config.json` only: it needs
    neither weights nor tokenizer, and takes no port.

    Raises ConfigError with one line per wrong key, or for a model that cannot be read.
    """
    model_facts(model)
    values = _laid_over(single_machine(model, Path("runs/plan")), file, overrides)
    values = _with_teachers(values, lambda count: range(1, count + 1))
    given = run_config.merge(recipe(_width(model), _trains_all_weights(values)), values)
    return _as_given(_shared_where_possible(given, model))


def _shared_where_possible(values: dict[str, Any], model: str) -> dict[str, Any]:
    """One engine for policy, judge and teacher, unless the user set that, or set up the frozen one
    differently from the policy's.
    """
    frozen = values["frozen"]
    policy = values["policy"].get("embedded", {})
    own = {key: one for key, one in frozen.get("embedded", {}).items() if key != "port"}
    is_alike = all(policy.get(key) == one for key, one in own.items())
    if "shared" in frozen or not is_alike or frozen.get("embedded", {}).get("port"):
        return values
    if has_experts(model):
        return values  # their adapters are merged for the engine
    later = {"judge": {"base_url": "http://127.0.0.1:0/v1", "model": "later"}}
    if run_config.build(run_config.merge(later, values)).why_not_shared is not None:
        return values
    return run_config.merge(values, {"frozen": {"shared": True}})


def _as_given(values: dict[str, Any]) -> RunConfig:
    """The values as they were written, with an address for a judge that is known only later."""
    judge = values.get("judge")
    if isinstance(judge, dict) and "model" in judge and "base_url" not in judge:
        raise ConfigError("judge.model: set judge.base_url too, the server that has this model")
    later = {"judge": {"base_url": "http://127.0.0.1:0/v1", "model": "later"}}
    return run_config.build(run_config.merge(later, values))


def _trains_all_weights(values: dict[str, Any]) -> bool:
    trainer = values.get("trainer")
    return isinstance(trainer, dict) and trains_all_weights(trainer.get("lora"))


def _is_served_here(config: RunConfig) -> bool:
    return any(engine.url is None for engine in (config.policy, config.frozen))


def _named_renderer(model: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """The renderer's settings if one is named; None if not. Loading it now reports one that does
    not fit, or a model without a chat template, in one line.
    """
    from rollout_bridge.config import RendererConfig
    from rollout_bridge.rendering.rendering import Rendering

    given = values.get("renderer", {})
    if "name" not in given:
        return None
    try:
        _check_template(Rendering.load(model, RendererConfig.model_validate(given)))
    except ValueError as error:
        raise ConfigError(f"renderer: {error}") from None
    return given


def _check_template(rendering: Rendering) -> None:
    """Raise ValueError for a model's own template that cannot show a single user message."""
    if rendering.template_only:
        try:
            rendering.prompt_ids([{"role": "user", "content": "Hello."}])
        except ValueError as error:
            raise ValueError(
                f"{error}: fix the model's chat_template.jinja, or set renderer.name to its family"
            ) from error


def _chosen_renderer(model: str, model_type: str) -> dict[str, Any]:
    from opd.models.renderer_choice import choose_renderer
    from rollout_bridge.rendering.rendering import Rendering

    try:
        config = choose_renderer(model, model_type)
        if config.name == "default":
            _check_template(Rendering.load(model, config))
        return config.model_dump(exclude_none=True)
    except ValueError as error:
        raise ConfigError(f"renderer: {error}") from None


def model_facts(model: str, *, is_served_here: bool = False) -> tuple[int, str]:
    """The most tokens that the model accepts, and its family, from its own configuration.

    Raises ConfigError, also if an embedded engine is to serve a model that it cannot serve.
    """
    try:
        reason = why_not_served(model) if is_served_here else None
        length = context_length(model, is_served_here=is_served_here)
        model_type = config_value(model, "model_type")
    except (OSError, ValueError) as error:
        fault = str(error).splitlines()[0]
        raise ConfigError(f"model: cannot load '{model}': {fault}") from None
    if reason is not None:
        raise ConfigError(
            f"model: '{model}': {reason}; use another model, or serve it from SGLang "
            "(docs/sglang.md: policy.url, frozen.url)"
        )
    if length is None:
        raise ConfigError(f"model: '{model}' does not state its context length; is it a causal LM?")
    return length, str(model_type)


def _width(model: str) -> int | None:
    width = config_value(model, "hidden_size")
    return width if isinstance(width, int) else None


def _judged_by_frozen_engine(values: dict[str, Any], length: int) -> RunConfig:
    answer = values["judge"].get("max_tokens", min(LONGEST_JUDGE_ANSWER, length // 4))
    own = {
        # The port is known only once ports are assigned.
        "base_url": "http://127.0.0.1:0/v1",
        "model": values["model"],
        "max_tokens": answer,
        "max_prompt_tokens": length - answer,
    }
    config = _assign_ports(run_config.build(run_config.merge({"judge": own}, values)))
    url = f"{config.frozen.base_url}/v1"
    return config.model_copy(update={"judge": config.judge.model_copy(update={"base_url": url})})


def _assign_ports(config: RunConfig) -> RunConfig:
    """A copy in which every port of a process that this run starts is set (0 means: any free
    one).
    """
    ports = iter(free_ports(3))
    update: dict[str, Any] = {}
    for role in ("policy", "frozen"):
        engine: EngineConfig = getattr(config, role)
        port = next(ports)
        if engine.embedded is not None and engine.embedded.port == 0:
            embedded = engine.embedded.model_copy(update={"port": port})
            update[role] = engine.model_copy(update={"embedded": embedded})
    if config.frozen.shared:
        policy: EngineConfig = update.get("policy", config.policy)
        update["frozen"] = config.frozen.model_copy(update={"embedded": policy.embedded})
    port = next(ports)
    if config.proxy.port == 0:
        update["proxy"] = config.proxy.model_copy(update={"port": port})
    return config.model_copy(update=update)
