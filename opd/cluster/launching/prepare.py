"""From the user's file to the resolved configuration of a cluster run.

Fills in what follows from the rest (the store of a single node, context lengths, who judges) and
refuses, by key, what slime cannot do or what a cluster must not do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from opd.cluster.architecture import Architecture, read_architecture
from opd.cluster.config import ClusterConfig
from opd.run import config as run_config
from opd.run.config import RunConfig
from records.config import SQLITE
from trainer.errors import ConfigError

FROZEN_VERSION = "frozen"
"""Weight version that the frozen engines report; the scoring worker refuses scores with another."""
LATER = "http://address-is-known-once-the-engines-run.invalid"
"""Address in the configuration of engines that the job starts; each process gets the real one."""
LONGEST_JUDGE_ANSWER = 1024
_NOT_IN_SLIME = {
    "dtype": "slime computes in bfloat16",
    "device": "the GPUs are those of [cluster]",
    "threads": "slime computes on GPUs",
    "keep_checkpoints": "slime keeps all checkpoints",
    "publish_attempts": "slime sends the weights itself",
    "publish_backoff_s": "slime sends the weights itself",
    "engine_check_interval_s": "slime sends the weights itself",
    "calibration_bound": "in bfloat16 only the mean can be bounded: set cluster.calibration_bound",
    "noise_floor_factor": "slime cannot skip the step of a batch that teaches only noise",
    "poll_interval_s": "that is handover.poll_interval_s",
}


def resolve(
    file: Path, overrides: list[str], run: Path
) -> tuple[RunConfig, Architecture | None, list[str]]:
    """(resolved configuration, architecture if it is known, warnings).

    Raises ConfigError or another StartupError with one line for each thing that is wrong.
    """
    values = run_config.merge(run_config.read_toml(file), run_config.parse_overrides(overrides))
    if "cluster" not in values:
        raise ConfigError(f"{file}: no section [cluster]; configs/ has examples")
    _refuse(values)
    # Checked once as the user wrote it, so that a wrong key is named before anything is derived.
    given = run_config.build(run_config.merge(_placeholders(values, run), values))
    cluster = given.cluster
    assert cluster is not None
    model, warnings = _architecture(given.model, cluster)
    config = run_config.build(
        run_config.merge(_derived(values, given, cluster, model, run), values)
    )
    _check(config, model)
    return config, model, warnings


def _placeholders(values: dict[str, Any], run: Path) -> dict[str, Any]:
    return {
        "store": {"url": f"{SQLITE}:///{run / 'records.db'}"},
        "judge": {"base_url": f"{LATER}/v1", "model": "judge"},
        **_teachers_later(values),
    }


def _teachers_later(values: dict[str, Any]) -> dict[str, Any]:
    """The teachers that the job starts, with addresses that are known only later."""
    names = _section(_section(values, "cluster"), "teachers")
    return {"scoring": {"teachers": dict.fromkeys(names, LATER)}} if names else {}


def _refuse(values: dict[str, Any]) -> None:
    problems = []
    for role in ("policy", "frozen"):
        if role in values:
            problems.append(f"{role}: the job starts its engines itself; remove this section")
    if "teachers" in values:
        problems.append(
            "teachers: the job's further teachers are in cluster.teachers; move it there"
        )
    judge = _section(values, "judge")
    if "base_url" in judge and "judge" in _section(values, "cluster"):
        problems.append("judge.base_url and cluster.judge are both set: choose one judge")
    if "model" in judge and "base_url" not in judge:
        problems.append("judge.model: set judge.base_url too, the server that has this model")
    if "name" not in _section(values, "renderer"):
        problems.append('renderer.name: name the renderer of the model\'s family, e.g. "qwen3"')
    for key, reason in _NOT_IN_SLIME.items():
        if key in _section(values, "trainer"):
            problems.append(f"trainer.{key}: {reason}; remove it")
    if problems:
        raise ConfigError("\n".join(problems))


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section as it was written; one of the wrong type is reported by the check that follows."""
    section = values.get(name, {})
    return section if isinstance(section, dict) else {}


def _architecture(folder: str, cluster: ClusterConfig) -> tuple[Architecture | None, list[str]]:
    path = Path(folder)
    if not path.is_absolute():
        raise ConfigError(
            f"model: '{folder}' must be the absolute path of a folder that every node sees; slime "
            "loads no hub ids"
        )
    if cluster.model_flags:
        if cluster.architecture is not None:
            raise ConfigError("cluster.architecture and cluster.model_flags are both set: choose")
        return None, []
    if not path.is_dir():
        if cluster.architecture is None:
            raise ConfigError(
                f"model: no folder {folder}, and no [cluster.architecture], which would be enough "
                "for a dry run"
            )
        return cluster.architecture, [
            f"no folder {folder} on this machine: architecture as [cluster.architecture] has it"
        ]
    model = read_architecture(path)
    if cluster.architecture is not None and cluster.architecture != model:
        pairs = zip(cluster.architecture, model, strict=True)
        wrong = [
            f"{key} {ours} against {theirs}" for (key, ours), (_, theirs) in pairs if ours != theirs
        ]
        raise ConfigError(
            f"cluster.architecture differs from {path / 'config.json'}: {', '.join(wrong)}; "
            "remove the section, or name the right model"
        )
    return model, []


def _derived(
    values: dict[str, Any],
    given: RunConfig,
    cluster: ClusterConfig,
    model: Architecture | None,
    run: Path,
) -> dict[str, Any]:
    """What the user may leave out; anything that was written stays."""
    derived: dict[str, Any] = {
        # What slime does around an update, which the proxy has to know.
        "trainer": {"pause_mode": "abort"},
        "scoring": {
            "expected_version": FROZEN_VERSION,
            **_teachers_later(values).get("scoring", {}),
        },
        "judge": _judge(values, given, cluster, model),
    }
    if "store" not in values:
        derived["store"] = {"url": f"{SQLITE}:///{run / 'records.db'}"}
    lengths = {name: _length(cluster, name, model) for name in ("policy", "frozen")}
    if lengths["policy"] is not None:
        derived["proxy"] = {"context_length": lengths["policy"]}
    if lengths["frozen"] is not None:
        derived["scoring"]["context_length"] = lengths["frozen"]
    return derived


def _judge(
    values: dict[str, Any], given: RunConfig, cluster: ClusterConfig, model: Architecture | None
) -> dict[str, Any]:
    if "base_url" in _section(values, "judge"):
        return {}
    if cluster.judge is not None:
        length = _server_length(cluster.judge.server_args)
        judge = {"base_url": f"{LATER}/v1", "model": cluster.judge.model}
    else:
        length = _length(cluster, "frozen", model)
        judge = {"base_url": f"{LATER}/v1", "model": given.model}
    if length is None:
        return judge
    answer = _section(values, "judge").get("max_tokens", min(LONGEST_JUDGE_ANSWER, length // 4))
    return {**judge, "max_tokens": answer, "max_prompt_tokens": length - answer}


def _length(cluster: ClusterConfig, group: str, model: Architecture | None) -> int | None:
    own = _server_length(getattr(cluster, group).server_args)
    return own if own is not None or model is None else model.max_position_embeddings


def _server_length(server_args: dict[str, Any]) -> int | None:
    length = server_args.get("context_length")
    return length if isinstance(length, int) else None


def _check(config: RunConfig, model: Architecture | None) -> None:
    cluster = config.cluster
    assert cluster is not None
    problems = []
    if config.trainer.pause_mode != "abort":
        problems.append(
            f"trainer.pause_mode {config.trainer.pause_mode}: slime aborts running requests for an "
            "update; leave it out"
        )
    if cluster.nodes > 1 and config.store.is_sqlite:
        problems.append(
            f"store.url: {make_url(config.store.url).drivername} is a file on one host and "
            f"cluster.nodes is {cluster.nodes}; use postgresql+asyncpg://USER@HOST/DATABASE"
        )
    experts = model.num_experts_per_tok if model is not None and model.is_moe else 0
    if model is not None and config.engine_client.routed_experts_topk not in (0, experts):
        problems.append(
            f"engine_client.routed_experts_topk {config.engine_client.routed_experts_topk}: the "
            f"model chooses {experts} experts for a token; set 0 or {experts}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
