"""Going back to an older version on a cluster: what the run goes back to, what that costs, and
which checkpoints are set aside.

slime keeps no weights but its checkpoints. So the run goes back to the newest checkpoint at or
before the wanted version, or to the start weights if there is none. It knows neither processes nor
the store.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from opd.cluster.paths import Paths
from rollout_bridge.slime.handovers import Handover, HandoverError, HandoverLog
from rollout_bridge.slime.saved import TRACKER, folder_name, saved_rollouts
from rollout_bridge.stop_order import read_stop
from trainer.checkpoints.manifest import withdrawn
from trainer.errors import CheckpointError, StartupError
from trainer.schedule.rollback_order import last_served, read_rollback

START = 0
"""The start weights have no link of their own: each job that begins with them gives them a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingBack:
    """`wanted`: the version that was ordered. `restores`: the one whose weights are loaded, those
    after rollout `rollout_id` (-1: the start). `lost`: what lies between the two; `withdrawn`: what
    came after `wanted`, as far as it is known to have been served.
    """

    wanted: int
    restores: int
    rollout_id: int
    lost: tuple[Handover, ...]
    withdrawn: tuple[Handover, ...]

    @property
    def parent(self) -> int:
        """The newest version that is given up."""
        return max([self.restores, *(one.version for one in (*self.lost, *self.withdrawn))])

    @property
    def where(self) -> str:
        """The weights that are loaded, in words."""
        if self.rollout_id < 0:
            return f"version {self.restores}, the start weights"
        return f"version {self.restores}, from checkpoint {folder_name(self.rollout_id)}"

    def said(self) -> list[str]:
        """What happens, and what is lost, a line each."""
        lines = [f"goes back to version {self.wanted}: the job begins with {self.where}"]
        if self.lost:
            lines.append(
                "lost too, as checkpoints are cluster.save_interval steps apart: "
                f"{_versions(self.lost)}; {_samples(self.lost)}"
            )
        if self.withdrawn:
            lines.append(f"withdrawn: {_versions(self.withdrawn)}; {_samples(self.withdrawn)}")
        return lines


def wanted_version(run: Path) -> int | None:
    """The version that RUN/rollback, or else RUN/stop, orders to go back to. Raises StartupError
    for an order that cannot be read.
    """
    try:
        version = read_rollback(run)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
    if version is not None:
        return version
    order = read_stop(run)
    return None if order is None else order.serve_version


def going_back(run: Path) -> GoingBack | None:
    """What an order makes of this run; None if there is none, or the newest job has followed it.

    Raises StartupError if it cannot be followed.
    """
    version = wanted_version(run)
    if version is None:
        return None
    chain, rollouts = newest_chain(run), saved_rollouts(run / "checkpoints")
    if _is_followed(version, chain, rollouts):
        return None
    try:
        back = back_to(version, chain, rollouts, served=last_served(run))
    except StartupError as error:
        raise StartupError(f"the order to go back in {run} cannot be followed: {error}") from error
    has_those_weights = chain[-1].kind == "start" and chain[-1].rollout_id == back.rollout_id
    return None if has_those_weights else back


def _is_followed(version: int, chain: Sequence[Handover], rollouts: Collection[int]) -> bool:
    """Whether the newest job, which has trained nothing yet, began by following the order. A launch
    that was killed then left the order behind.
    """
    for number in range(len(chain) - 1, 0, -1):
        newest = chain[number]
        if newest.kind != "start":
            return False
        if newest.restores is not None:
            try:
                before = back_to(version, chain[:number], rollouts, served=None)
            except StartupError:
                return False  # it was ordered later, for a version that was not there yet
            return before.restores == newest.restores
    return False


def newest_chain(run: Path) -> list[Handover]:
    """The versions of a run, oldest first. Raises StartupError if there are none, or a record is
    damaged.
    """
    try:
        chain = HandoverLog(run).newest_chain()
    except HandoverError as error:
        raise StartupError(str(error)) from error
    if not chain:
        raise StartupError(f"{run}: there are no versions yet")
    return chain


def back_to(
    version: int, chain: Sequence[Handover], rollouts: Collection[int], *, served: int | None
) -> GoingBack:
    """Choose the checkpoint, of those after `rollouts`. `served`: the newest version that was
    served; None: that is not known, and all of the chain may have been.

    Raises StartupError for a version that the run does not have, or has withdrawn.
    """
    gone = withdrawn(chain)
    left = [one for one in chain if one.version not in gone]
    if version != START and all(one.version != version for one in left):
        names = ", ".join(str(one.version) for one in left if one.kind == "step") or "none"
        what = "was withdrawn" if version in gone else "is not in the chain of this run"
        raise StartupError(f"version {version} {what}; choose 0 (the start) or one of: {names}")
    if version == START:
        kept = [one for one in left if one.rollout_id < 0]
        wanted = kept[-1].version if kept else START
    else:
        there = {-1, *rollouts}
        kept = [one for one in left if one.version <= version and one.rollout_id in there]
        wanted = version
    if not kept:
        raise StartupError(
            f"version {version} cannot be restored: the run did not begin with the start weights, "
            "and no checkpoint is that old"
        )
    source = kept[-1]
    after = [one for one in left if one.version > source.version]
    newest = chain[-1].version if served is None else served
    return GoingBack(
        wanted=version,
        restores=source.version,
        rollout_id=source.rollout_id,
        lost=tuple(one for one in after if one.version <= wanted),
        withdrawn=tuple(one for one in after if wanted < one.version <= newest),
    )


def set_aside(back: GoingBack, paths: Paths, new_version: int) -> None:
    """Move the checkpoints after `back` out of slime's way, to RUN/withdrawn, and name the one that
    it loads next time. Doing it again changes nothing.

    Without this, a job that dies before its first checkpoint would resume from withdrawn weights.
    """
    tracker = paths.checkpoints / TRACKER
    if back.rollout_id < 0:
        # A folder without it has no checkpoint; slime then begins with the start weights.
        tracker.unlink(missing_ok=True)
    else:
        _write(tracker, str(back.rollout_id))
    aside = paths.withdrawn / f"before_v{new_version:09d}"
    for path in _later(back, paths):
        target = aside / path.parent.name / path.name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.rename(target)


def set_aside_line(back: GoingBack, paths: Paths) -> str:
    """What `set_aside` moves, in words."""
    names = ", ".join(f"{path.parent.name}/{path.name}" for path in _later(back, paths))
    return f"moved to {paths.withdrawn}: {names or 'no checkpoint'}"


def _later(back: GoingBack, paths: Paths) -> list[Path]:
    """The checkpoints after the one that is loaded, in both formats."""
    found = [*paths.checkpoints.glob("iter_*"), *paths.hf.glob("[0-9]*")]
    numbers = {path: path.name.removeprefix("iter_") for path in found}
    return sorted(
        path
        for path, number in numbers.items()
        if number.isdecimal() and int(number) > back.rollout_id
    )


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and on disk."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _versions(links: Sequence[Handover]) -> str:
    first, last = links[0].version, links[-1].version
    return f"version {first}" if first == last else f"versions {first} to {last}"


def _samples(links: Sequence[Handover]) -> str:
    """How many samples of these versions train no more."""
    turns = sum(len(one.turn_ids) for one in links)
    lessons = sum(len(one.lesson_ids) for one in links)
    counted = [f"{turns} turns", *([f"{lessons} lessons"] if lessons else [])]
    return f"what was trained there never trains again: {', '.join(counted)}"
