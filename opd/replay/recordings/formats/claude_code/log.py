"""The lines of one Claude Code log on their way to a tree: lines that belong together are joined.

`sessions.py` describes the lines. Pure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.replay.recordings.checks import Fault
from opd.replay.recordings.formats.blocks import response_of, text_of
from opd.replay.recordings.formats.claude_code.compaction import Compactions
from opd.replay.recordings.formats.lines import Line
from opd.replay.recordings.formats.tree import Node
from opd.replay.recordings.recorded import ImportProblem, Problem

_CALLS = {"tool_use": "input"}
_NOT_SAMPLED = "<synthetic>"
"""The model that Claude Code names for answers that it wrote itself."""


class ClaudeCodeLog:
    """Takes in lines in order and returns the nodes that they make."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes: list[Node] = []
        self._owners: dict[str, Node] = {}
        """The node that the line of a uuid is part of."""
        self._session_ids: dict[str, str] = {}
        self._responses: dict[str, Node] = {}
        """The node of a response, by its `message.id`."""
        self._blocks: dict[str, list[Any]] = {}
        self._results: dict[str, Node] = {}
        """The node of the results of a response's calls, by the response's node."""
        self._compactions = Compactions()

    def problem(self, line: int, detail: str) -> Problem:
        """A line that is not in this format."""
        reason = ImportProblem.BAD_SHAPE
        return Problem(source=str(self._path), line=line, reason=reason, detail=detail)

    def add(self, line: Line) -> Problem | None:
        """Take in a line; returns a Problem if it is not in this format."""
        value = line.value
        kind, uuid = value.get("type"), value.get("uuid")
        if not isinstance(kind, str):
            return self.problem(line.number, "a line must have a text 'type'")
        if not isinstance(uuid, str):
            if kind in ("user", "assistant"):
                return self.problem(line.number, f"a line of type {kind!r} has no text 'uuid'")
            return None
        if uuid not in self._owners:
            self._owners[uuid] = self._owner(kind, uuid, line)
        return None

    def nodes(self) -> list[Node]:
        """The nodes in the order of their first lines, with their parents among them."""
        for node in self._nodes:
            if node.parent in self._owners:
                node.parent = self._owners[node.parent].identity
            if node.kept_from in self._owners:
                node.kept_from = self._owners[node.kept_from].identity
        self._compactions.cut_loose(self._owners)
        return self._nodes

    def session_id(self, root: Node) -> str:
        """The session of the tree that begins with `root`."""
        return self._session_ids[root.identity]

    def _owner(self, kind: str, uuid: str, line: Line) -> Node:
        """The node that the line is part of: its own, or an earlier one that it continues."""
        value = line.value
        parent = value.get("parentUuid")
        parent = parent if isinstance(parent, str) else None
        node = Node(
            identity=uuid,
            parent=self._compactions.parent_of(uuid, parent),
            line=line.number,
        )
        if kind == "assistant":
            node = self._with_response(node, value)
        elif kind == "user":
            node = self._with_user(node, value)
        elif value.get("subtype") == "compact_boundary":
            self._compactions.add(node, value)
        if node.identity == uuid:
            self._session_ids[uuid] = _session_id(value, self._path)
            self._nodes.append(node)
        return node

    def _with_response(self, node: Node, value: dict[str, Any]) -> Node:
        message = value.get("message")
        if not isinstance(message, dict):
            node.fault = Fault(ImportProblem.BAD_SHAPE, "the line's 'message' is not an object")
            return node
        if value.get("isApiErrorMessage") or message.get("model") == _NOT_SAMPLED:
            return node
        content = message.get("content")
        message_id = message.get("id")
        if isinstance(message_id, str):
            node = self._responses.setdefault(message_id, node)
        if isinstance(content, list):
            blocks = self._blocks.setdefault(node.identity, [])
            blocks += [block for block in content if block not in blocks]
            content = blocks
        node.messages = [response_of(content, _CALLS)]
        return node

    def _with_user(self, node: Node, value: dict[str, Any]) -> Node:
        message = value.get("message")
        if not isinstance(message, dict):
            node.fault = Fault(ImportProblem.BAD_SHAPE, "the line's 'message' is not an object")
            return node
        if value.get("isMeta"):
            return node
        node.is_summary = bool(value.get("isCompactSummary"))
        node.kept_from = self._compactions.first_kept(node.identity)
        node.messages = _user_messages(message.get("content"))
        if any(said["role"] != "tool" for said in node.messages):
            return node
        response = self._said_before(node)
        if response is None or response.messages[0]["role"] != "assistant":
            return node
        results = self._results.setdefault(response.identity, node)
        if results is not node:
            answered = [said["tool_call_id"] for said in results.messages]
            if any(said["tool_call_id"] in answered for said in node.messages):
                return node
            results.messages += node.messages
        return results

    def _said_before(self, node: Node) -> Node | None:
        """The nearest node before `node` that says something."""
        before = self._owners.get(node.parent) if node.parent is not None else None
        passed: set[str] = set()
        while before is not None and not before.messages and before.identity not in passed:
            passed.add(before.identity)
            before = self._owners.get(before.parent) if before.parent is not None else None
        return before if before is not None and before.messages else None


def _session_id(value: dict[str, Any], path: Path) -> str:
    session = value.get("sessionId")
    session = session if isinstance(session, str) and session else path.stem
    if not value.get("isSidechain"):
        return session
    agent = value.get("agentId")
    return f"{session}/agent-{agent}" if agent else f"{session}/sidechain-{value['uuid']}"


def _user_messages(content: Any) -> list[dict[str, Any]]:
    """A user line's messages: its tool results, and what the user says after them."""
    if not isinstance(content, list):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    said: list[Any] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            answered, text = block.get("tool_use_id"), text_of(block.get("content"))
            results.append({"role": "tool", "tool_call_id": answered, "content": text})
        else:
            said.append(block)
    if said or not results:
        results.append({"role": "user", "content": text_of(said)})
    return results
