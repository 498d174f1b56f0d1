"""Session logs whose lines form a tree: from nodes to the entries of a conversation.

A node is what one line says, or several lines of one message; it may have no messages (a setting, a
hook's report), and then it only passes its parent on. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from opd.replay.recordings.checks import Fault, checked_message
from opd.replay.recordings.entries import Entry
from opd.replay.recordings.recorded import ImportProblem


@dataclass(slots=True, kw_only=True)
class Node:
    """A node while the log is read. `messages` are raw, in OpenAI's shape; `fault` is a fault of
    the line, and stands for a message if there is none.
    """

    identity: str
    parent: str | None
    line: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    fault: Fault | None = None
    is_summary: bool = False
    kept_from: str | None = None
    is_sampled: bool = True


def trees(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """The nodes of each tree, the root first and parents before children.

    `nodes` are in the file's order and name parents among them. A missing parent is a fault of the
    node that names it: what its model had read is unknown. Nodes that only lead to each other have
    no root; `rootless` returns them.
    """
    known = {node.identity for node in nodes}
    children: dict[str, list[Node]] = {}
    roots: list[Node] = []
    for node in nodes:
        if node.parent is None or node.parent not in known:
            roots.append(node)
        else:
            children.setdefault(node.parent, []).append(node)
    for root in roots:
        if root.parent is not None and root.fault is None:
            detail = f"the line before it, {root.parent!r}, is not in the file"
            root.fault = Fault(ImportProblem.BAD_SHAPE, detail)
        yield list(_preorder(root, children))


def rootless(nodes: Sequence[Node]) -> list[Node]:
    """Nodes whose parents form a cycle."""
    parents = {node.identity: node.parent for node in nodes}
    grounded: set[str] = set()
    lost: list[Node] = []
    for node in nodes:
        path: dict[str, None] = {}
        identity: str | None = node.identity
        while identity is not None and identity in parents and identity not in grounded:
            if identity in path:
                lost.append(node)
                break
            path[identity] = None
            identity = parents[identity]
        else:
            grounded.update(path)
    return lost


def _preorder(root: Node, children: dict[str, list[Node]]) -> Iterator[Node]:
    """The nodes of a tree, parents before children, siblings in the file's order."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(children.get(node.identity, [])))


def entries_of(nodes: Sequence[Node]) -> list[Entry]:
    """The entries of one or more trees of a session, whose nodes come after their parents.

    Positions count in the file's order, whatever the paths.
    """
    first = _first_positions(nodes)
    last: dict[str, int | None] = {}
    entries: list[Entry] = []
    for node in nodes:
        parent = last.get(node.parent) if node.parent is not None else None
        position = first[node.identity]
        for raw in _messages(node):
            message, fault = checked_message(raw)
            entries.append(
                Entry(
                    position=position,
                    parent=parent,
                    message=message,
                    fault=node.fault or fault,
                    line=node.line,
                    is_summary=node.is_summary,
                    kept_from=_kept_position(node, first),
                    is_sampled=node.is_sampled,
                )
            )
            parent, position = position, position + 1
        last[node.identity] = parent
    return entries


def _messages(node: Node) -> list[Any]:
    """A node's messages; a faulty line without messages is a lost message."""
    return [None] if node.fault is not None and not node.messages else node.messages


def _first_positions(nodes: Sequence[Node]) -> dict[str, int]:
    """The position of each node's first entry; of a node without one, that of what follows."""
    first: dict[str, int] = {}
    position = 0
    for node in sorted(nodes, key=lambda node: node.line):
        first[node.identity] = position
        position += len(_messages(node))
    return first


def _kept_position(node: Node, first: dict[str, int]) -> int | None:
    return None if node.kept_from is None else first.get(node.kept_from)
