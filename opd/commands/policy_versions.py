"""The versions of a run: listing them, showing one, going back, and resuming after a stop.

It reads manifests, or on a cluster the records of what slime was given, and writes orders that the
trainer or the launch follows; it changes no checkpoint itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from opd.cluster.going_back import back_to, newest_chain
from opd.report.curves import metric_rows
from opd.run import config as run_config
from opd.run.config import RunConfig
from rollout_bridge.engine.served import StagedFirst
from rollout_bridge.guard.checks import Checked, never_served, read_checks
from rollout_bridge.rehearsal.figures import figures
from rollout_bridge.rehearsal.journal import read_rows
from rollout_bridge.slime.saved import saved_rollouts
from rollout_bridge.stop_order import STOP_FILE, StopOrder, order_stop, why_stopped
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest, chain_to, withdrawn
from trainer.errors import CheckpointError, StartupError
from trainer.schedule.rollback_order import order_rollback

_SHOWN_METRICS = (
    "loss",
    "opd/adv_mean",
    "kl_loss",
    "grad_norm",
    "entropy_loss",
    "staleness_mean",
    "seconds/step",
)
"""Metrics of the step that made the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A version of a run, whoever trains it. `weights`: whether they are kept."""

    version: int
    step: int
    created_at: float
    turn_ids: tuple[str, ...]
    lesson_ids: tuple[str, ...]
    restores: int | None
    weights: Literal["kept", "deleted", "none"]


def list_versions(config_file: Path) -> str:
    """A line per version, oldest first: step, when, turns, lessons, weights, what became of it."""
    chain, folder = _chain(config_file), config_file.parent
    gone, refused = withdrawn(chain), never_served(read_checks(folder))
    lines = [f"{'version':>7} {'step':>5}  {'when':16} {'turns':>5} {'lessons':>7}  weights  "]
    for link in chain:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(link.created_at))
        notes = [f"restores version {link.restores}"] if link.restores is not None else []
        notes += _fate(folder, link.version, gone, refused)
        notes += ["newest"] if link is chain[-1] else []
        lines.append(
            f"{link.version:>7} {link.step:>5}  {when} {len(link.turn_ids):>5} "
            f"{len(link.lesson_ids):>7}  {link.weights:7}  {', '.join(notes)}".rstrip()
        )
    return "\n".join([lines[0].rstrip(), *lines[1:]])


def _fate(folder: Path, version: int, gone: Set[int], refused: Set[int]) -> list[str]:
    """What became of a version, if it is not simply served."""
    if version in refused:
        return ["not published"]
    if version in gone:
        return ["withdrawn"]
    return ["waits for its check"] if StagedFirst(folder).is_unserved(version) else []


def roll_back(config_file: Path, version: int) -> str:
    """Order the trainer to go back to `version`; returns what happens next, and on a cluster what
    that costs.

    Raises StartupError for a version that cannot be restored.
    """
    folder, config = config_file.parent, run_config.load(config_file)
    if config.cluster is not None:
        return _roll_back_cluster(folder, version)
    checkpoints, chain = _manifests(config_file, config)
    try:
        checkpoints.source_of(version, chain)
    except CheckpointError as error:
        raise StartupError(f"--version: {error}") from error
    order_rollback(folder, version)
    return (
        f"rollback to version {version} is ordered: the trainer does it between two steps, or when "
        "the run starts"
    )


def _roll_back_cluster(folder: Path, version: int) -> str:
    chain = newest_chain(folder)
    if version == chain[-1].version:
        raise StartupError(f"--version: version {version} is the newest, and needs no rollback")
    try:
        back = back_to(version, chain, saved_rollouts(folder / "checkpoints"), served=None)
    except StartupError as error:
        raise StartupError(f"--version: {error}") from error
    order_rollback(folder, version)
    return "\n".join(
        [
            f"rollback to version {version} is ordered: the launch ends the job after its step, "
            "and starts it again, or does so when it starts. Until then the endpoint does not "
            "answer, which takes minutes.",
            *back.said(),
        ]
    )


def pin(config_file: Path, version: int) -> str:
    """Order the trainer to serve `version` and to pause training; returns a line on what happens
    next.

    Raises StartupError for a version without weights, and if training has already stopped.
    """
    config, folder = run_config.load(config_file), config_file.parent
    if config.cluster is not None:
        raise StartupError(
            f"slime keeps no weights to serve beside those that it trains: go back with opd policy "
            f"rollback --run {folder} --version {version}, and stop training with an empty file "
            f"{folder / STOP_FILE}"
        )
    checkpoints, chain = _manifests(config_file, config)
    if (reason := why_stopped(folder)) is not None:
        raise StartupError(f"{folder}: training has stopped already: {reason}; resume it first")
    kept = [link.version for link in chain if checkpoints.has_weights(link.version)]
    if version not in kept:
        names = ", ".join(map(str, kept))
        raise StartupError(
            f"--version: the weights of version {version} are not kept; choose one of: {names}"
        )
    order_stop(folder, StopOrder(reason=f"version {version} is pinned", serve_version=version))
    return (
        f"version {version} is served from the trainer's next check on, and training pauses; "
        f"opd policy resume --run {folder} resumes it"
    )


def show(config_file: Path, version: int) -> str:
    """What is known about one version, line by line. Raises StartupError if it does not exist."""
    chain = _chain(config_file)
    link = next((one for one in chain if one.version == version), None)
    if link is None:
        raise StartupError(f"--version: version {version} is not in the chain of this run")
    folder = config_file.parent
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(link.created_at))
    facts: list[tuple[str, object]] = [
        ("version", version),
        ("step", link.step),
        ("made", when),
        ("turns", len(link.turn_ids)),
        ("lessons", len(link.lesson_ids)),
        ("weights", link.weights),
    ]
    facts += [("restores", link.restores)] if link.restores is not None else []
    refused = never_served(read_checks(folder))
    facts += [(one, "yes") for one in _fate(folder, version, withdrawn(chain), refused)]
    facts += _measured(folder, version)
    return "\n".join(f"{name:<24}{value}" for name, value in facts)


def compare(config_file: Path, first: int, second: int) -> str:
    """The measurements of two versions, side by side, and what was trained between them.

    Raises StartupError if one does not exist, and for one version named twice.
    """
    chain = _chain(config_file)
    if first == second:
        raise StartupError(f"--version and --against are both {first}: name two versions")
    for option, version in (("--version", first), ("--against", second)):
        if not any(link.version == version for link in chain):
            raise StartupError(f"{option}: version {version} is not in the chain of this run")
    folder = config_file.parent
    numbers = [_numbers(folder, version) for version in (first, second)]
    lines = [_row("", f"version {first}", f"version {second}", "difference")]
    for name in dict.fromkeys(name for found in numbers for name in found):
        values = [found.get(name) for found in numbers]
        lines.append(_row(name, *(_shown(value) for value in values), _difference(*values)))
    lines += _per_hint(folder, first, second)
    return "\n".join([*lines, _between(chain, first, second)])


def _row(*cells: str) -> str:
    name, *values = cells
    return (f"{name:<46}" + "".join(f"{value:>14}" for value in values)).rstrip()


def _shown(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def _difference(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{after - before:+.4g}"


def _per_hint(folder: Path, first: int, second: int) -> Iterator[str]:
    """The gap of each hint that was measured at either version."""
    rows = {row.version: row for row in read_rows(folder)}
    gaps: dict[str, list[float | None]] = {}
    for place, version in enumerate((first, second)):
        for hint in rows[version].hints if version in rows else ():
            if hint.gap is not None:
                gaps.setdefault(hint.hint_id, [None, None])[place] = hint.gap.value
    for hint_id, (before, after) in gaps.items():
        yield _row(f"gap of {hint_id}", _shown(before), _shown(after), _difference(before, after))


def _between(chain: Sequence[_Link], first: int, second: int) -> str:
    """What the versions after the older one trained, up to the newer one."""
    low, high = sorted((first, second))
    links = [link for link in chain if low < link.version <= high]
    gone = withdrawn(chain)
    left = [link for link in links if link.version not in gone]
    turns = sum(len(link.turn_ids) for link in left)
    lessons = sum(len(link.lesson_ids) for link in left)
    line = f"trained between them: {turns} turns and {lessons} lessons in {len(left)} versions"
    taken_back = len(links) - len(left)
    return line + (f"; withdrawn: {taken_back}" if taken_back else "")


def _measured(folder: Path, version: int) -> Iterator[tuple[str, object]]:
    """What the step, the rehearsal and the guard have measured of it, if anything."""
    for name, value in _numbers(folder, version).items():
        yield name, f"{value:.4g}"
    for check in read_checks(folder):
        if check.version == version:
            yield "canaries right", f"{check.passed} of {check.asked}"
            yield from (("breach", breach) for breach in check.breaches)


def _numbers(folder: Path, version: int) -> dict[str, float]:
    """What was measured of it, by name."""
    step = next((one for one in metric_rows(folder) if one.get("version") == version), {})
    found = {key: float(step[key]) for key in _SHOWN_METRICS if step.get(key) is not None}
    for row in read_rows(folder):
        if row.version == version:
            found |= figures(row)
            # It is the version that was asked for.
            found.pop("measured_version", None)
    for check in read_checks(folder):
        if check.version == version:
            found |= _of_check(check)
    return found


def _of_check(check: Checked) -> dict[str, float]:
    values = {
        "canaries right, share": check.passed / check.asked if check.asked else None,
        "KL to the start": check.kl,
        "KL from the last good": check.kl_last,
        "gap, trained turns": None if check.gap is None else check.gap.value,
    }
    return {name: value for name, value in values.items() if value is not None}


def resume(config_file: Path) -> str:
    """Remove RUN/stop. Raises StartupError if training is not stopped."""
    folder = config_file.parent
    reason = why_stopped(folder)
    if reason is None:
        raise StartupError(f"{folder}: training is not stopped")
    (folder / STOP_FILE).unlink(missing_ok=True)
    return f"training resumes; it had stopped: {reason}"


def _chain(config_file: Path) -> list[_Link]:
    config = run_config.load(config_file)
    if config.cluster is not None:
        return _cluster_chain(config_file.parent)
    checkpoints, chain = _manifests(config_file, config)
    return [
        _Link(
            version=one.version,
            step=one.step,
            created_at=one.created_at,
            turn_ids=one.turn_ids,
            lesson_ids=one.lesson_ids,
            restores=one.restores,
            weights="kept" if checkpoints.has_weights(one.version) else "deleted",
        )
        for one in chain
    ]


def _cluster_chain(folder: Path) -> list[_Link]:
    chain = newest_chain(folder)
    gone, saved = withdrawn(chain), {-1, *saved_rollouts(folder / "checkpoints")}
    return [
        _Link(
            version=one.version,
            step=one.rollout_id + 1,
            created_at=one.created_at,
            turn_ids=one.turn_ids,
            lesson_ids=one.lesson_ids,
            restores=one.restores,
            weights="kept" if one.version not in gone and one.rollout_id in saved else "none",
        )
        for one in chain
    ]


def _manifests(config_file: Path, config: RunConfig) -> tuple[Checkpoints, list[Manifest]]:
    checkpoints = Checkpoints(config_file.parent / "checkpoints", config.model, config.trainer.seed)
    known: dict[int, Manifest] = {}
    try:
        for folder in checkpoints.root.glob("step_*"):
            manifest = Manifest.read(folder)
            known[manifest.version] = manifest
        if not known:
            raise StartupError(f"{checkpoints.root}: there are no versions yet")
        return checkpoints, chain_to(known[max(known)], known)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
