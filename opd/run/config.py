"""The configuration of one run: a TOML file plus dotted overrides, checked strictly.

Every section belongs to the package that reads it; this module only puts them together. Unknown
keys are errors that name the nearest valid key. The resolved configuration is written into the run
folder, and every process of the run reads that file: nothing is read from the environment.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from api_proxy.config import ProxyConfig
from judge.config import JudgeConfig
from judge.verifier.config import VerifierConfig
from opd.cluster.config import ClusterConfig
from opd.guard.config import GuardConfig
from opd.replay.config import ReplayConfig, check_resampling
from opd.run.checks import check_rehearsal, check_run
from records.config import StoreConfig
from records.reading.waiting_limits import WaitingLimits
from rollout_bridge.config import RendererConfig, ScoringConfig
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.keys import EngineKeys, read_key_file
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.slime.settings import HandoverConfig
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.objectives.options import OBJECTIVE_NAMES
from trainer.objectives.rollout_correction.config import BESIDE_PRESET

MadeBy: TypeAlias = Literal["serve", "replay", "lab", "slime"]


class EngineConfig(BaseModel):
    """One engine of the run: started by the run, or already running somewhere."""

    model_config = ConfigDict(extra="forbid")

    url: str | None = None
    """Base URL of a running engine (SGLang, or another run's). Unset: the run starts an embedded
    one.
    """
    api_key: SecretStr | None = None
    """Key of the engine at `url` (SGLang: `--api-key`)."""
    admin_api_key: SecretStr | None = None
    """Its key for pauses and weight updates, if it requires another one for them (SGLang:
    `--admin-api-key`).
    """
    embedded: EmbeddedEngineConfig | None = None
    """Settings of the embedded engine; ignored when `url` is set."""

    @property
    def keys(self) -> EngineKeys:
        """The keys that the engine requires. Raises ConfigError if its own key cannot be read."""
        if self.url is not None:
            return EngineKeys(api=_text(self.api_key), admin=_text(self.admin_api_key))
        if self.embedded is None or self.embedded.api_key_file is None:
            return EngineKeys()
        try:
            return EngineKeys(api=read_key_file(self.embedded.api_key_file))
        except ValueError as error:
            raise ConfigError(f"engine: embedded.{error}") from None

    @property
    def is_set(self) -> bool:
        """Whether there is an engine."""
        return self.url is not None or self.embedded is not None

    @property
    def base_url(self) -> str:
        """Where the engine answers."""
        if self.url is not None:
            return self.url
        if self.embedded is None:
            raise ConfigError(
                "engine: set url, or the embedded section, so that there is an engine"
            )
        return f"http://{self.embedded.host}:{self.embedded.port}"


class FrozenConfig(EngineConfig):
    """The frozen engine: a separate one, or the base in the policy's."""

    shared: bool = False
    """The policy's embedded engine serves judge and teacher too, with the start weights, without
    the policy's adapters; `policy.embedded` then contains the settings of this one engine. Needs
    `trainer.lora`. A new `opd serve` run shares if it can.
    """


class TeacherGroup(BaseModel):
    """A further teacher on embedded engines that the run starts."""

    model_config = ConfigDict(extra="forbid")

    embedded: EmbeddedEngineConfig
    """Settings of each of its engines; `model` is the teacher."""
    replicas: int = Field(default=1, ge=1)
    """Engines of it, which take turns."""
    ports: list[int] = Field(default_factory=list)
    """Their ports; those that are missing are chosen by the run."""

    def engine(self, number: int) -> EmbeddedEngineConfig:
        """One of its engines, counted from 0."""
        return self.embedded.model_copy(update={"port": self.ports[number]})

    @property
    def urls(self) -> list[str]:
        """Where they answer."""
        return [f"http://{self.embedded.host}:{port}" for port in self.ports]


class RunConfig(BaseModel):
    """Everything that a run's processes need to know."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Start weights of policy, judge and teacher: a local folder or a hub id."""
    made_by: MadeBy | None = None
    """The command that this run belongs to; written by it. No other command continues the run."""
    seed: int = 0
    """Seed of everything random, except in the agents."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    store: StoreConfig
    policy: EngineConfig = Field(default_factory=EngineConfig)
    frozen: FrozenConfig = Field(default_factory=FrozenConfig)
    """The engine with the frozen start weights: teacher, and judge unless `judge.base_url`
    differs.
    """
    teachers: dict[str, TeacherGroup] = Field(default_factory=dict)
    """Further teachers on engines that the run starts; those that run elsewhere are in
    `scoring.teachers`.
    """
    engine_client: EngineClientConfig = Field(default_factory=EngineClientConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    judge: JudgeConfig
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """What becomes of recorded sessions."""
    rehearsal: RehearsalConfig = Field(default_factory=RehearsalConfig)
    """What becomes of accepted hints beyond the turn that each came from."""
    guard: GuardConfig = Field(default_factory=GuardConfig)
    """What each version is checked on, and when the run goes back."""
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    """What decides how well a session went, once it is over."""
    handover: HandoverConfig = Field(default_factory=HandoverConfig)
    """How turns are handed to slime's trainer; only for `opd slime`."""
    cluster: ClusterConfig | None = None
    """GPU layout and slime installation; only for `opd slime`."""

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        check_run(self.trainer, self.scoring, self.judge)
        check_rehearsal(self.rehearsal, self.scoring, self.trainer)
        check_resampling(self.replay, self.trainer)
        if self.trainer.objective.values_turns and not (
            self.verifier.source is not None and self.verifier.continuations
        ):
            raise ValueError(
                'trainer.objective.reward_baseline = "process" compares what turns were worth: set '
                "verifier.source, and verifier.continuations to 4 or so"
            )
        if self.made_by == "replay" and self.verifier.source is not None:
            raise ValueError(
                "a replay ends when its turns are scored, and waits for no verifier: unset "
                "verifier.source, and write each session's outcome into its outcome_reward"
            )
        if self.guard.is_on and self.trainer.keep_checkpoints < 2:
            raise ValueError(
                "guard.canaries goes back to the previous version: set trainer.keep_checkpoints to "
                "2 or more"
            )
        keeps_base = self.trainer.lora is not None and self.trainer.publish == "adapter"
        if self.is_one_server and not keeps_base:
            raise ValueError(
                "policy.url and frozen.url are one server, so its base must not change: set "
                'trainer.lora and trainer.publish = "adapter", or give frozen.url a separate server'
            )
        if self.frozen.shared and (why := self.why_not_shared) is not None:
            raise ValueError(f"frozen.shared: {why}, or frozen.shared=false")
        return self

    @property
    def is_one_server(self) -> bool:
        """Whether policy, judge and teacher use one server that the run did not start."""
        policy, frozen = self.policy.url, self.frozen.url
        return (
            policy is not None and frozen is not None and policy.rstrip("/") == frozen.rstrip("/")
        )

    @property
    def waiting(self) -> WaitingLimits:
        """What turns wait for, and how long, to explain it to users."""
        return WaitingLimits(
            batch_size=self.trainer.rollout_batch_size,
            idle_timeout_s=self.proxy.idle_timeout_s,
            hint_wait_s=self.trainer.hint_wait_s if self.rehearsal.enabled else None,
            outcome_wait_s=(
                None
                if self.trainer.objective.outcome_reward is None
                else self.trainer.outcome_wait_s
            ),
        )

    @property
    def why_not_shared(self) -> str | None:
        """What keeps one engine from serving policy, judge and teacher."""
        if self.policy.url is not None or self.frozen.url is not None:
            return (
                "only an engine that the run starts can be shared: unset policy.url and frozen.url"
            )
        if self.policy.embedded is None or self.frozen.embedded is None:
            return "set policy.embedded and frozen.embedded"
        if self.policy.embedded.model != self.frozen.embedded.model:
            return "policy.embedded.model and frozen.embedded.model differ: set one"
        if self.trainer.lora is None or self.trainer.publish == "merged":
            return "all of the policy's weights change: set trainer.lora and trainer.publish=auto"
        return None


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """`["trainer.lr=1e-4"]` -> nested dict. A value is TOML if it parses as TOML, else text."""
    tree: dict[str, Any] = {}
    for item in overrides:
        key, separator, raw = item.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override '{item}': write it as section.key=value")
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw
        *sections, leaf = key.strip().split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override '{item}': {section} already has a value")
        node[leaf] = value
    return tree


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, section by section; neither is changed.

    A section that names something else than its base (another objective, another renderer, another
    preset) replaces it: the options of one mean nothing to the other.
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and _is_same(below, value):
            value = merge(below, value)
        merged[key] = value
    return merged


def _is_same(below: dict[str, Any], section: dict[str, Any]) -> bool:
    """Whether a section names the same as the one below it, or nothing; a preset may also be laid
    over settings that are allowed next to presets.
    """
    if section.get("name", below.get("name")) != below.get("name"):
        return False
    takes_preset = below.keys() <= BESIDE_PRESET and bool(below)
    return takes_preset or section.get("preset", below.get("preset")) == below.get("preset")


def build(values: dict[str, Any]) -> RunConfig:
    """Validate; raises ConfigError with one line per wrong key."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def load(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """The configuration file of a run, with overrides laid over it."""
    config = build(merge(read_toml(path), parse_overrides(overrides or [])))
    if config.store.is_sqlite or config.store.spill_folder is not None:
        return config
    store = config.store.model_copy(update={"spill_folder": path.parent / "spill"})
    return config.model_copy(update={"store": store})


def read_toml(path: Path) -> dict[str, Any]:
    """The file's values; raises ConfigError that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: it is a folder; name a file of settings (TOML)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def save(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration for the run's processes, readable only by this user.

    Unset optional values are left out (TOML has no null); secrets are written as they are.
    """
    values = config.model_dump(mode="python", exclude_none=True)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(tomli_w.dumps(_plain(values)), encoding="utf-8")


def _text(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


def _explain(item: Any) -> str:
    # In a section with several kinds, the kind is its name's value, not a key that anybody wrote.
    where = ".".join(str(part) for part in item["loc"] if part not in OBJECTIVE_NAMES)
    if item["type"] == "value_error":
        # The input is the whole section; the message says which of its keys are meant.
        message = item["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    if item["type"] == "union_tag_invalid":
        given = str(item["ctx"]["tag"])
        near = difflib.get_close_matches(given, OBJECTIVE_NAMES, n=1, cutoff=0.3)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return f"{where}.name: unknown '{given}'; {hint}known: {', '.join(OBJECTIVE_NAMES)}"
    if item["type"] != "extra_forbidden":
        return f"{where}: {item['msg']} (got {item.get('input')!r})"
    valid = _keys_at(RunConfig, item["loc"][:-1])
    near = difflib.get_close_matches(str(item["loc"][-1]), valid, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"valid keys: {', '.join(sorted(valid))}"
    return f"{where}: unknown key; {hint}"


def _keys_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Valid keys at a location of an error; in a section with several kinds, the location names the
    kind.
    """
    kinds: list[type[BaseModel]] = [model]
    for part in location:
        named = [kind for kind in kinds if _kind_name(kind) == part]
        if named:
            kinds = named
            continue
        fields = [kind.model_fields[str(part)] for kind in kinds if str(part) in kind.model_fields]
        kinds = [below for field in fields for below in _models_of(field.annotation)]
    return [key for kind in kinds[:1] for key in kind.model_fields]


def _kind_name(kind: type[BaseModel]) -> object:
    field = kind.model_fields.get("name")
    options = typing.get_args(field.annotation) if field is not None else ()
    return options[0] if len(options) == 1 else None


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return [
        option for option in options if isinstance(option, type) and issubclass(option, BaseModel)
    ]


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
