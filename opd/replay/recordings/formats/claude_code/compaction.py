"""Compaction in Claude Code's logs: which line follows which, if the log itself says otherwise.

A boundary line (`subtype` "compact_boundary") starts anew (`parentUuid` null) and names the line
that it really follows (`logicalParentUuid`); the summary is a user line after it. Newer versions
keep the last messages (`compactMetadata`: `preservedSegment`, `preservedMessages`): these follow
the summary in the log, although they were said before it, and what follows names the last of them
as its parent.
Shapes: https://github.com/daaain/claude-code-log, `test/test_data/dag_compact_after_rewind*.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opd.replay.recordings.formats.tree import Node


class Compactions:
    """Takes in boundary lines, and corrects the parents of the lines after them."""

    def __init__(self) -> None:
        self._boundaries: list[tuple[Node, str | None]] = []
        """Each boundary, and its summary if that keeps lines."""
        self._moved: dict[str, str] = {}
        """The summary that stands between a kept line and what follows it."""
        self._moves: dict[str, list[tuple[str, str]]] = {}
        """What was moved after a summary: each line, and the kept line that the log names."""
        self._before: dict[str, str] = {}
        """The kept line that a kept line was said after."""
        self._first_kept: dict[str, str] = {}
        """The first line that is kept, by the uuid of the summary."""

    def add(self, boundary: Node, value: Mapping[str, Any]) -> None:
        """Take in a boundary line, and let it follow what it really follows."""
        logical = value.get("logicalParentUuid")
        if boundary.parent is None and isinstance(logical, str):
            boundary.parent = logical
        metadata = _object(value.get("compactMetadata"))
        segment = _object(metadata.get("preservedSegment"))
        kept = _texts(_object(metadata.get("preservedMessages")).get("uuids"))
        ends = _texts([segment.get("headUuid"), segment.get("tailUuid")])
        anchor = segment.get("anchorUuid")
        kept = kept or ends
        if not kept or not isinstance(anchor, str):
            self._boundaries.append((boundary, None))
            return
        self._boundaries.append((boundary, anchor))
        boundary.parent = kept[-1]
        self._moved[kept[-1]] = anchor
        self._first_kept[anchor] = kept[0]
        if kept != ends:
            self._before.update(zip(kept[1:], kept[:-1], strict=True))

    def parent_of(self, uuid: str, parent: str | None) -> str | None:
        """The line that a line follows, if the log names `parent`."""
        if uuid in self._before:
            return self._before[uuid]
        if parent is None or parent not in self._moved:
            return parent
        self._moves.setdefault(self._moved[parent], []).append((uuid, parent))
        return self._moved[parent]

    def first_kept(self, summary: str) -> str | None:
        """The first line that is kept with a summary."""
        return self._first_kept.get(summary)

    def cut_loose(self, owners: Mapping[str, Node]) -> None:
        """Let boundaries begin trees if what they really follow is not in the file, or only after
        them.

        Nothing is lost: the summary replaces what was before, and what is kept of it is read where
        the log has it. `owners` maps each uuid to its node, whose parent is a node's identity.
        """
        for boundary, summary in self._boundaries:
            passed = {boundary.identity}
            at = boundary
            while at.parent is not None and at.parent in owners and at.parent not in passed:
                passed.add(at.parent)
                at = owners[at.parent]
            if at.parent is not None:
                boundary.parent = None
                for uuid, kept in self._moves.get(summary or "", ()):
                    if kept in owners and owners[uuid].identity == uuid:
                        owners[uuid].parent = owners[kept].identity


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(values: Any) -> Sequence[str]:
    """The texts in a list; none if something else is in it."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values
