"""Session logs of OpenClaw, which are those of the pi coding agent: one file, one session.

Sources: https://github.com/badlogic/pi-mono, `packages/coding-agent/docs/session.md` and
`packages/coding-agent/src/core/session-manager.ts` (how a prompt is built from the entries);
`packages/ai/src/providers/transform-messages.ts` (what is not sent again);
https://github.com/openclaw/openclaw, `docs/reference/session-management-compaction.md`,
`src/config/sessions/transcript.ts` and `src/gateway/server-methods/chat-transcript-inject.ts`.
Files are `~/.openclaw/agents/ID/sessions/*.jsonl` and `~/.pi/agent/sessions/*/*.jsonl`.

- The first line is a header (`type` "session"); its `id` names the session. The others are entries
  with `id` and `parentId`, a tree. Version 1 has no ids: each line follows the one before it, so a
  line that cannot be read is a message that is missing from all prompts after it.
- `message`: user, assistant and toolResult; bashExecution and custom become user messages, unless
  marked as not for the model. `custom_message` is a user message.
- `compaction`: the prompt after it is its summary, as a user message, then the entries from
  `firstKeptEntryId` on. `branch_summary` is a user message. pi puts a sentence around the text of
  both, which is not repeated here.
- Answers that ended in an error or were aborted are not sent again and are not turns. Messages that
  OpenClaw itself wrote under the role of the assistant are context, not turns.
- Other types are settings and labels, and are skipped. System prompt and tools are not logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd.replay.recordings.checks import Fault
from opd.replay.recordings.conversation import session_of
from opd.replay.recordings.entries import Origin
from opd.replay.recordings.formats.blocks import response_of, text_of
from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, Line, read_lines
from opd.replay.recordings.formats.tree import Node, entries_of, rootless, trees
from opd.replay.recordings.recorded import ImportProblem, Problem, Recording, RecordingFormat

_CALLS = {"toolCall": "arguments", "toolUse": "input", "functionCall": "arguments"}
_NOT_SENT_AGAIN = ("error", "aborted")
_NOT_SAMPLED = ("delivery-mirror", "gateway-injected")


def is_openclaw(value: dict[str, Any]) -> bool:
    """Whether a line is of this format."""
    kind = value.get("type")
    if kind == "session":
        return isinstance(value.get("id"), str) and "timestamp" in value
    return kind == "message" and isinstance(value.get("message"), dict) and "timestamp" in value


def read_openclaw(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Recording:
    """The session of `path`."""
    header: dict[str, Any] | None = None
    nodes: list[Node] = []
    identities: list[str] = []
    taken: set[str] = set()
    for line in read_lines(path, max_line_bytes):
        before = nodes[-1].identity if nodes else None
        if isinstance(line, Line) and line.value.get("type") == "session":
            header = header or line.value
            identities.append("")
        elif isinstance(line, Line):
            node = _node(line, before, identities)
            identities.append(node.identity)
            if node.identity not in taken:
                taken.add(node.identity)
                nodes.append(node)
        elif line.line is not None and _is_linear(header):
            nodes.append(_lost(line, before))
        else:
            yield line
    named = header.get("id") if header is not None else None
    origin = Origin(
        session_id=named if isinstance(named, str) and named else path.stem,
        format=RecordingFormat.OPENCLAW,
        source=str(path),
        line=None,
    )
    for node in rootless(nodes):
        detail = "the entry's parents form a cycle"
        yield origin.problem(ImportProblem.BAD_SHAPE, detail, None, node.line)
    in_order = [node for tree in trees(nodes) for node in tree]
    yield from session_of(entries_of(in_order), origin, tools=[])


def _is_linear(header: dict[str, Any] | None) -> bool:
    return header is None or header.get("version", 1) == 1


def _lost(problem: Problem, before: str | None) -> Node:
    """A line that cannot be read and may have been a message."""
    line = problem.line or 0
    fault = Fault(problem.reason, problem.detail)
    return Node(identity=f"line {line}", parent=before, line=line, fault=fault)


def _node(line: Line, before: str | None, identities: Sequence[str]) -> Node:
    """The entry in `line`. `before` and `identities` are what precedes it, for version 1."""
    value = line.value
    kind = value.get("type")
    node = Node(identity=f"line {line.number}", parent=before, line=line.number)
    if isinstance(value.get("id"), str):
        node.identity = value["id"]
        parent = value.get("parentId")
        node.parent = parent if isinstance(parent, str) else None
    if not isinstance(kind, str):
        node.fault = Fault(ImportProblem.BAD_SHAPE, "an entry must have a text 'type'")
    elif kind == "message":
        _add_message(node, value.get("message"))
    elif kind == "custom_message":
        node.messages.append({"role": "user", "content": text_of(value.get("content"))})
    elif kind in ("compaction", "branch_summary"):
        node.messages.append({"role": "user", "content": value.get("summary")})
        node.is_summary = kind == "compaction"
        node.kept_from = _first_kept(value, identities)
    return node


def _first_kept(compaction: dict[str, Any], identities: Sequence[str]) -> str | None:
    """The entry that a compaction keeps first: by its id or, in version 1, by its number."""
    identity = compaction.get("firstKeptEntryId")
    if isinstance(identity, str):
        return identity
    index = compaction.get("firstKeptEntryIndex")
    if isinstance(index, int) and 0 <= index < len(identities):
        return identities[index]
    return None


def _add_message(node: Node, message: Any) -> None:
    """Put the part of `message` that was sent to the model into the node, if any."""
    if not isinstance(message, dict):
        node.fault = Fault(ImportProblem.BAD_SHAPE, "the entry's 'message' is not an object")
        return
    role = message.get("role")
    content = message.get("content")
    if role == "assistant":
        if message.get("stopReason") not in _NOT_SENT_AGAIN:
            node.messages.append(response_of(content, _CALLS))
            node.is_sampled = message.get("model") not in _NOT_SAMPLED
    elif role == "toolResult":
        result = {"role": "tool", "tool_call_id": message.get("toolCallId")}
        result["name"] = message.get("toolName")
        node.messages.append({**result, "content": text_of(content)})
    elif role == "bashExecution":
        if not message.get("excludeFromContext"):
            said = f"$ {message.get('command')}\n{message.get('output')}"
            node.messages.append({"role": "user", "content": said})
    elif role in ("branchSummary", "compactionSummary"):
        node.messages.append({"role": "user", "content": message.get("summary")})
        node.is_summary = role == "compactionSummary"
    elif role in ("custom", "hookMessage"):
        node.messages.append({"role": "user", "content": text_of(content)})
    else:
        node.messages.append({"role": role, "content": text_of(content)})
