"""Which turns and lessons each step of a slime job was given: small files that outlive store and
job.

A record is written when turns are handed over, before slime trains on them, and names its parent by
the hash of its bytes. slime's own checkpoint then decides: the chain that ends at the record of its
rollout is what the weights have seen, and whatever was handed over later was not trained. So it
does not matter at which instruction a job died. It does not know slime.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from records.store import Store
from records.types import START, PolicyVersion
from rollout_bridge.slime.saved import folder_name

FORMAT = 1
FOLDER = "handovers"


class HandoverError(Exception):
    """The records contradict each other or slime's checkpoint; one line with what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """`step`: rollout `rollout_id` was given `turn_ids` and `lesson_ids`, and training on them
    makes `version`. `start`: a job began with the weights after rollout `rollout_id` and calls them
    `version`.

    `staleness` is aligned with `turn_ids`: steps since each was sampled. `restores` makes a start
    that of a rollback: its parent is the newest version that was given up, its weights are those of
    this older one.
    """

    kind: Literal["start", "step"]
    version: int
    parent_version: int | None
    parent_hash: str | None
    rollout_id: int
    turn_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    created_at: float
    lesson_ids: tuple[str, ...] = ()
    restores: int | None = None

    def __post_init__(self) -> None:
        if len(self.turn_ids) != len(self.staleness):
            raise ValueError("one staleness per turn")
        if self.restores is not None and self.kind != "start":
            raise ValueError("only a start restores an older version")

    @property
    def has_samples(self) -> bool:
        """Whether it was given any turn or lesson."""
        return bool(self.turn_ids or self.lesson_ids)

    def to_bytes(self) -> bytes:
        """The file's content; the same record gives the same bytes."""
        content = {"format": FORMAT, **asdict(self)}
        if not self.lesson_ids:
            # Records that were written before there were lessons have the same bytes, and hash.
            del content["lesson_ids"]
        if self.restores is None:
            del content["restores"]
        return json.dumps(content, sort_keys=True).encode() + b"\n"

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the file's content."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def policy_version(self, checkpoints: Path) -> PolicyVersion:
        """The form in which the store keeps it."""
        return PolicyVersion(
            version=self.version,
            parent_version=self.parent_version,
            checkpoint=(
                START if self.rollout_id < 0 else str(checkpoints / folder_name(self.rollout_id))
            ),
            manifest_hash=self.hash,
            created_at=self.created_at,
            restores=self.restores,
        )


class HandoverLog:
    """The records of a run, in one folder; one process writes."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER

    def write(self, record: Handover) -> None:
        """Durable on return. Raises FileExistsError if the version already exists."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(record.version)
        if path.exists():
            raise FileExistsError(path)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(record.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def highest_version(self) -> int:
        """The highest version of any record, lost branches included; 0 without any."""
        return max((int(path.stem[1:]) for path in self.folder.glob("v*.json")), default=0)

    def chain(self, rollout_id: int) -> list[Handover]:
        """The records that made the weights after `rollout_id` (-1: the start), oldest first.

        [] if there is no record of that rollout or of an earlier one: the weights come from
        elsewhere. Raises HandoverError for a damaged or missing record.
        """
        records = self._records()
        tips = [record for record in records.values() if record.rollout_id == rollout_id]
        if not tips:
            earlier = [one.rollout_id for one in records.values() if one.rollout_id < rollout_id]
            if earlier:
                raise HandoverError(
                    f"{self.folder}: slime loads the checkpoint of rollout {rollout_id}, but the "
                    f"records end at rollout {max(earlier)}; load a checkpoint of this run"
                )
            return []
        # A rollout that was trained again after a resume has the higher version.
        return self._chain_to(max(tips, key=lambda record: record.version), records)

    def newest_chain(self, end: int | None = None) -> list[Handover]:
        """The records of the newest job and of what it continued, oldest first, up to version `end`
        at most. [] without any. Raises HandoverError for a damaged or missing record.
        """
        records = self._records()
        if not records:
            return []
        chain = self._chain_to(records[max(records)], records)
        return [one for one in chain if end is None or one.version <= end]

    def _records(self) -> dict[int, Handover]:
        return {record.version: record for record in map(_read, self.folder.glob("v*.json"))}

    def _chain_to(self, newest: Handover, records: dict[int, Handover]) -> list[Handover]:
        chain = [newest]
        while chain[-1].parent_version is not None:
            parent = records.get(chain[-1].parent_version)
            if parent is None or parent.hash != chain[-1].parent_hash:
                raise HandoverError(
                    f"{self.folder}: record {chain[-1].parent_version}, the parent of "
                    f"{chain[-1].version}, is missing or changed; restore it"
                )
            chain.append(parent)
        chain.reverse()
        return chain

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:09d}.json"


async def weight_start_version(store: Store, run_folder: Path) -> int:
    """What slime's `update_weight_start_version` must be for the next job of a run: the number from
    which it goes on numbering weights, so that no two weights ever have the same label.
    """
    return max(await store.highest_version(), HandoverLog(run_folder).highest_version())


def step_versions(chain: Sequence[Handover]) -> list[int]:
    """The versions that count as trained steps, oldest first, after 0 for the start of the run.

    A start is not a step: its weights are its parent's, or the start's, under a new name.
    """
    return [0, *(record.version for record in chain if record.kind == "step")]


def _read(path: Path) -> Handover:
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != FORMAT:
            raise HandoverError(f"{path}: unknown format")
        content["turn_ids"] = tuple(content["turn_ids"])
        content["staleness"] = tuple(content["staleness"])
        content["lesson_ids"] = tuple(content.get("lesson_ids", ()))
        return Handover(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HandoverError(f"{path}: not a readable record: {error}") from error
