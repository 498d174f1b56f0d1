"""Whether a run's checkpoints and its store agree. It only reads, and imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from records.types import PolicyVersion
from trainer.checkpoints.manifest import FILE_NAME, Manifest, chain_to
from trainer.errors import CheckpointError


def checkpoint_problems(
    folder: Path,
    versions: Mapping[int, PolicyVersion],
    trained: Mapping[str, int],
    *,
    lessons: Mapping[str, int],
    may_lack_turns: bool,
) -> list[str]:
    """What is wrong with the checkpoints in `folder`, a line each.

    `versions`, `trained` (turn id -> version) and `lessons` (lesson id -> version) are the store's.
    With `may_lack_turns`, turns and lessons of the manifests may be missing from it: deletion
    removes them.
    """
    problems: list[str] = []
    known: dict[int, Manifest] = {}
    for path in sorted(folder.glob("step_*")):
        try:
            manifest = Manifest.read(path)
            known[manifest.version] = manifest
            problems += _file_problems(path, manifest)
        except CheckpointError as error:
            problems.append(str(error))
    alive = [number for number in known if number in versions and not versions[number].abandoned]
    if not alive:
        return problems
    newest = max(alive)
    try:
        chain = chain_to(known[newest], known)
    except CheckpointError as error:
        return [*problems, str(error)]
    for manifest in chain[1:]:
        row = versions.get(manifest.version)
        if row is None:
            problems.append(f"version {manifest.version} has a checkpoint but is not in the store")
        elif row.manifest_hash != manifest.hash:
            problems.append(f"version {manifest.version}: the store has another manifest")
    turns = {turn_id: link.version for link in chain for turn_id in link.turn_ids}
    rehearsed = {lesson_id: link.version for link in chain for lesson_id in link.lesson_ids}
    last = chain[-1].version
    problems += _trained_problems("turns", turns, trained, may_lack_turns, last)
    return problems + _trained_problems("lessons", rehearsed, lessons, may_lack_turns, last)


def _file_problems(folder: Path, manifest: Manifest) -> list[str]:
    if all(path.name == FILE_NAME for path in folder.iterdir()):
        return []  # pruned: older checkpoints keep their manifests only
    problems = []
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.size:
            problems.append(f"{path} is missing or truncated")
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                problems.append(f"{path} has changed")
    return problems


def _trained_problems(
    what: str,
    on_chain: Mapping[str, int],
    trained: Mapping[str, int],
    may_lack: bool,
    last_version: int,
) -> list[str]:
    """Where the manifests (id -> version, up to `last_version`) and the store differ."""
    problems = []
    missing = sorted(one for one in on_chain if one not in trained)
    if missing and not may_lack:
        problems.append(
            f"{len(missing)} {what} of the manifests are not trained in the store: "
            f"{missing[0]}, ..."
        )
    other = sorted(one for one, version in on_chain.items() if trained.get(one, version) != version)
    if other:
        problems.append(f"{len(other)} {what} are trained in another version: {other[0]}, ...")
    extra = sorted(
        one for one, version in trained.items() if one not in on_chain and version <= last_version
    )
    if extra:
        problems.append(
            f"{len(extra)} {what} are trained in the store but in no manifest: {extra[0]}, ...; "
            "the trainer corrects this when it starts"
        )
    return problems
