"""Everything that a launch writes and runs, worked out beforehand as plain values.

`launch.py` carries a plan out, `show.py` prints it: a dry run shows what a launch would do because
both look at the same values.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from opd.cluster.architecture import Architecture
from opd.cluster.config import ClusterConfig
from opd.cluster.files import custom_file, sglang_file
from opd.cluster.flag_check import REPOSITORY, FlagReport, check_flags
from opd.cluster.flags import Sections, command_line, slime_flags
from opd.cluster.going_back import GoingBack, going_back
from opd.cluster.hooks import check_objective, hook_paths
from opd.cluster.launching.prepare import LATER, resolve
from opd.cluster.layout import Layout, build_layout, teacher_group
from opd.cluster.paths import Paths, next_launch
from opd.cluster.routing import RoutingReplay, routing_problem, routing_replay
from opd.run import config as run_config
from opd.run.checks import run_warnings
from opd.run.config import RunConfig
from rollout_bridge.slime.saved import tracked_rollout
from rollout_bridge.slime.settings import is_pipelined
from trainer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Command lines of a launch, as lists of words."""

    ray_head: list[str]
    ray_worker: list[str]
    """To be run on each other node."""
    ray_nodes: list[str]
    """Prints the nodes that have joined."""
    submit: list[str]
    stop_job: list[str]
    proxy: list[str]
    """Arguments of this Python; the engines' addresses are added when they are known."""
    judge: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch."""

    config: RunConfig
    layout: Layout
    paths: Paths
    sections: Sections
    files: dict[Path, str]
    """The files written along with the configuration; a launch replaces the 0 in the custom one by
    the store's number.
    """
    commands: Commands
    flags: FlagReport
    warnings: tuple[str, ...]
    routing: tuple[RoutingReplay, str] | None
    """What a mixture of experts replays, and why; None for other models."""
    resumes: bool
    """Whether the run folder contains a checkpoint to resume from."""
    model: Architecture | None
    """The model's sizes, where they are known."""
    back: GoingBack | None
    """What an order to go back makes of this launch."""

    @property
    def cluster(self) -> ClusterConfig:
        """The section that every plan has."""
        assert self.config.cluster is not None
        return self.config.cluster


def make_plan(file: Path, overrides: list[str], run: Path) -> LaunchPlan:
    """Plan a launch. Raises StartupError (ConfigError, LayoutError...) for anything wrong."""
    run = run.resolve()
    config, model, warnings = resolve(file, overrides, run)
    return _planned(config, model, warnings, run)


def plan_again(plan: LaunchPlan) -> LaunchPlan:
    """The next launch of the same run: it goes back, if that was ordered. Raises StartupError."""
    return _planned(plan.config, plan.model, [], plan.paths.run)


def _planned(
    config: RunConfig, model: Architecture | None, warnings: list[str], run: Path
) -> LaunchPlan:
    cluster = config.cluster
    assert cluster is not None
    check_objective(config.trainer)
    is_moe = model is not None and model.is_moe
    problem = routing_problem(config, is_moe=is_moe)
    if problem is not None:
        raise ConfigError(problem)
    layout = build_layout(cluster, model, config.trainer.rollout_batch_size)
    paths = next_launch(run)
    _same_run(config, paths)
    back = going_back(run)
    sections = slime_flags(config, layout, model, paths, back)
    files = {
        paths.sglang_yaml: sglang_file(config, layout),
        paths.custom_yaml: custom_file(paths, config.trainer, 0, back),
    }
    report = check_flags(
        cluster,
        command_line(sections),
        _server_args(files[paths.sglang_yaml]),
        hook_paths([flag for flags in sections.values() for flag in flags]),
        {str(path): text for path, text in files.items()} if Path(config.model).is_dir() else None,
        job_environment(cluster, paths),
    )
    return LaunchPlan(
        config=config,
        layout=layout,
        paths=paths,
        sections=sections,
        files=files,
        commands=commands(config, paths, sections),
        flags=report,
        warnings=(*warnings, *run_warnings(config.trainer), *report.warnings),
        routing=routing_replay(config) if is_moe else None,
        resumes=tracked_rollout(paths.checkpoints) >= 0,
        model=model,
        back=back,
    )


def driver_of(config: RunConfig) -> str:
    """slime's training script: one step after another, or the next batch prepared during a step."""
    checked = config.rehearsal.enabled or config.guard.is_on
    pipelined = is_pipelined(config.trainer.schedule, checked=checked)
    return "train_async.py" if pipelined else "train.py"


def commands(config: RunConfig, paths: Paths, sections: Sections) -> Commands:
    """The command lines; pure."""
    cluster = config.cluster
    assert cluster is not None
    # Without a token, anybody who reaches Ray's port could run anything on all nodes. Ray finds it
    # through the environment only.
    token = ["env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={paths.ray_token}"]
    ray = [*token, cluster.python, "-m", "ray.scripts.scripts"]
    head = cluster.ray.head_ip or "127.0.0.1"
    joined = f"{head}:{cluster.ray.port}"
    dashboard = ["--address", f"http://127.0.0.1:{cluster.ray.dashboard_port}"]
    job = f"{paths.run.name}-{paths.launch.name}"
    gpus = ["--num-gpus", str(cluster.gpus_per_node), "--disable-usage-stats", "--block"]
    own = ["-m", "opd.cli.app"]
    return Commands(
        ray_head=[
            *ray,
            "start",
            "--head",
            *("--node-ip-address", head, "--port", str(cluster.ray.port)),
            *("--dashboard-host", "127.0.0.1"),
            *("--dashboard-port", str(cluster.ray.dashboard_port)),
            *("--dashboard-agent-listen-port", str(cluster.ray.agent_port)),
            *gpus,
        ],
        ray_worker=[
            *(*ray, "start", "--address", joined),
            *("--dashboard-agent-listen-port", str(cluster.ray.agent_port)),
            *gpus,
        ],
        ray_nodes=[*token, cluster.python, "-m", "opd.cluster.launching.ray_nodes", joined],
        submit=[
            *(*ray, "job", "submit", *dashboard, "--submission-id", job),
            *("--runtime-env-json", json.dumps({"env_vars": job_environment(cluster, paths)})),
            "--",
            *(cluster.python, f"{cluster.slime_root}/{driver_of(config)}", *command_line(sections)),
        ],
        stop_job=[*ray, "job", "stop", *dashboard, job],
        proxy=[*own, "proxy", "--run", str(paths.run)],
        judge=[*own, "judge", "--run", str(paths.run)],
    )


def job_environment(cluster: ClusterConfig, paths: Paths) -> dict[str, str]:
    """Environment of everything that runs inside slime."""
    roots = [cluster.megatron_root, cluster.slime_root, str(REPOSITORY)]
    return {
        "PYTHONPATH": os.pathsep.join(roots),
        "PYTHONUNBUFFERED": "1",
        # Megatron's overlap of computation and communication relies on one queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TENSORBOARD_DIR": str(paths.tensorboard),
        # slime's own calls: without these they would send what it prints, and code.
        "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",
        **cluster.env,
    }


def engine_overrides(config: RunConfig, addresses: dict[str, str]) -> list[str]:
    """`--set` words that tell proxy and judge where the engines of this launch answer.

    Raises ConfigError for an address that is missing.
    """
    judging = "frozen" if config.cluster is None or config.cluster.judge is None else "judge"
    own_judge = config.judge.base_url.startswith(LATER)
    teachers = [] if config.cluster is None else list(config.cluster.teachers)
    wanted = {"policy", "frozen", *([judging] if own_judge else []), *map(teacher_group, teachers)}
    if missing := wanted - set(addresses):
        raise ConfigError(f"engines.json: no address of {', '.join(sorted(missing))}")
    words = ["--set", f"policy.url={addresses['policy']}"]
    words += ["--set", f"frozen.url={addresses['frozen']}"]
    for name in teachers:
        words += ["--set", f"scoring.teachers.{name}={addresses[teacher_group(name)]}"]
    return [*words, "--set", f"judge.base_url={addresses[judging]}/v1"] if own_judge else words


def _same_run(config: RunConfig, paths: Paths) -> None:
    """A run folder belongs to one model and one store: anything else would mix two runs."""
    if not paths.config.is_file():
        return
    before = run_config.load(paths.config)
    for key, ours, theirs in (
        ("model", config.model, before.model),
        ("store.url", config.store.url, before.store.url),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{key}: {paths.run} was created with another one; give this run its own folder "
                "(--run)"
            )


def _server_args(text: str) -> list[str]:
    """All keys of ServerArgs that the engines' file sets."""
    keys = {
        key
        for model in json.loads(text)["sglang"]
        for group in model["server_groups"]
        for key in group["overrides"]
    }
    return sorted(keys)
