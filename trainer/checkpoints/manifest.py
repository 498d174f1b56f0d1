"""What a checkpoint says about itself, and the chain that manifests form.

A manifest names its parent by the hash of the parent's bytes, so that a chain proves which turns
the weights have seen, each once. It knows no weights.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from records.types import PolicyVersion
from trainer.errors import CheckpointError

FILE_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and hex SHA-256 of one file next to the manifest."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of the policy. Version 0 is the start: no parent, no turns, no files.

    `step` counts trained steps along the chain; `staleness` is aligned with `turn_ids`,
    `lesson_staleness` with `lesson_ids`. `times` is also aligned with `turn_ids`: 2 if the chain
    trained the turn once before; empty if it is the first time for all. A step without lessons, or
    without repeats, has the same bytes as before these fields existed.

    `restores` makes it the link of a rollback: it has the weights and the optimiser's state of that
    ancestor, and trained nothing itself.
    """

    version: int
    parent_version: int | None
    parent_hash: str | None
    step: int
    turn_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    model: str
    seed: int
    created_at: float
    files: dict[str, FileEntry]
    lesson_ids: tuple[str, ...] = ()
    lesson_staleness: tuple[int, ...] = ()
    restores: int | None = None
    times: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.turn_ids) != len(self.staleness):
            raise ValueError("one staleness per turn")
        if self.times and (len(self.times) != len(self.turn_ids) or min(self.times) < 1):
            raise ValueError("one count from 1 per turn, or none at all")
        if len(self.lesson_ids) != len(self.lesson_staleness):
            raise ValueError("one staleness per lesson")
        if len(set(self.turn_ids)) != len(self.turn_ids):
            raise ValueError(f"version {self.version}: a turn occurs twice in one step")
        if len(set(self.lesson_ids)) != len(self.lesson_ids):
            raise ValueError(f"version {self.version}: a lesson occurs twice in one step")
        if (self.parent_version is None) != (self.parent_hash is None):
            raise ValueError("parent version and parent hash belong together")
        if self.restores is not None and (self.turn_ids or self.lesson_ids):
            raise ValueError("a rollback trains nothing")

    def to_bytes(self) -> bytes:
        """The file's content; the same manifest gives the same bytes."""
        content = {"format": FORMAT, **asdict(self)}
        if not self.lesson_ids:
            del content["lesson_ids"], content["lesson_staleness"]
        if self.restores is None:
            del content["restores"]
        if not self.times:
            del content["times"]
        return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the file's content."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError if the file is missing, damaged or of another format."""
        path = folder / FILE_NAME
        try:
            content: Any = json.loads(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise CheckpointError(f"{path}: unknown format")
            files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            content["turn_ids"] = tuple(content["turn_ids"])
            content["staleness"] = tuple(content["staleness"])
            content["lesson_ids"] = tuple(content.get("lesson_ids", ()))
            content["lesson_staleness"] = tuple(content.get("lesson_staleness", ()))
            content["times"] = tuple(content.get("times", ()))
            return cls(files=files, **content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a readable manifest: {error}") from error

    @property
    def time_of(self) -> dict[str, int]:
        """Id of each turn -> how often the chain has trained it, this step included."""
        return dict(zip(self.turn_ids, self.times or (1,) * len(self.turn_ids), strict=True))

    def policy_version(self, checkpoint: str) -> PolicyVersion:
        """As the store keeps it; `checkpoint` is the folder (for version 0 the start model)."""
        return PolicyVersion(
            version=self.version,
            parent_version=self.parent_version,
            checkpoint=checkpoint,
            manifest_hash=self.hash,
            created_at=self.created_at,
            restores=self.restores,
        )


def chain_to(manifest: Manifest, known: dict[int, Manifest]) -> list[Manifest]:
    """From version 0 to `manifest`, along parents whose hashes match.

    Raises CheckpointError if an ancestor is missing or changed, a lesson was trained twice, or a
    turn twice for the same time.
    """
    chain = [manifest]
    while chain[-1].parent_version is not None:
        child = chain[-1]
        assert child.parent_version is not None
        parent = known.get(child.parent_version)
        if parent is None or parent.hash != child.parent_hash or parent.version >= child.version:
            raise CheckpointError(
                f"version {child.version}: its parent {child.parent_version} is missing or changed"
            )
        chain.append(parent)
    chain.reverse()
    seen: Counter[str] = Counter()
    for link in chain:
        trained = dict.fromkeys(link.lesson_ids, 1) | link.time_of
        for one, time in sorted(trained.items()):
            if time != seen[one] + 1:
                raise CheckpointError(
                    f"version {link.version} says that it trained {one} for time {time}, and its "
                    f"ancestors trained it {seen[one]} times"
                )
        seen.update(trained.keys())
    return chain


class Link(Protocol):
    """What a chain of versions is made of, wherever it is written down."""

    @property
    def version(self) -> int: ...

    @property
    def restores(self) -> int | None: ...


def withdrawn(chain: Sequence[Link]) -> set[int]:
    """The versions of a chain, oldest first, whose weights a later rollback gave up."""
    gone: set[int] = set()
    for link in chain:
        if link.restores is not None:
            gone |= {one.version for one in chain if link.restores < one.version < link.version}
    return gone
