"""Session logs of Claude Code: `~/.claude/projects/*/*.jsonl`, one file per session.

The format is not documented by its makers. Sources: https://github.com/daaain/claude-code-log
(`claude_code_log/models.py`, `test/test_data/*.jsonl`), https://github.com/empathic/toolpath
(`crates/toolpath-claude/src/types.rs`), recorded lines in
https://github.com/microsoft/vscode-copilot-chat/pull/3560 (subagents, progress lines), tests of
https://docs.rs/crate/csift (parallel tool results), and, on compaction,
https://blog.fsck.com/releases/2026/02/22/claude-code-session-continuation.

- A line has `type`, `uuid`, `parentUuid`, `sessionId`, `isSidechain`; user and assistant lines have
  Anthropic's `message`. The lines are a tree: an edited prompt starts another branch.
- One response is written as several lines, one per content block, with one `message.id`. They are
  one message here. The results of parallel calls follow different lines of it; they stay together.
- A user line's tool results become tool messages, its text a user message after them.
- After a compaction, the prompt is the summary (`isCompactSummary`), then the messages that were
  kept, if some were, then what follows (compaction.py).
- Sidechains (subagents) are separate sessions: inside the file, or in `agent-ID.jsonl`. Their ids
  contain the id of the session that they belong to, because agent ids are not unique.
- Other types (summary, system, progress, attachment, file-history-snapshot and future ones),
  `isMeta` lines, and errors written as if the model had said them, only pass their parent on.
- A line that was written before, with the same uuid, is a replay and skipped.
- System prompt and tools are not logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd.replay.recordings.conversation import session_of
from opd.replay.recordings.entries import Origin
from opd.replay.recordings.formats.claude_code.log import ClaudeCodeLog
from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, read_lines
from opd.replay.recordings.formats.tree import Node, entries_of, rootless, trees
from opd.replay.recordings.recorded import Problem, Recording, RecordingFormat

_FIRST_LINES = ("summary", "file-history-snapshot", "queue-operation", "permission-mode")


def is_claude_code(value: dict[str, Any]) -> bool:
    """Whether a line is of this format."""
    if isinstance(value.get("uuid"), str) and "parentUuid" in value:
        return True
    kind = value.get("type")
    return kind in _FIRST_LINES and bool({"leafUuid", "messageId", "sessionId"} & value.keys())


def read_claude_code(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Recording:
    """The sessions of `path`: the session itself and its sidechains, by their first lines."""
    log = ClaudeCodeLog(path)
    for line in read_lines(path, max_line_bytes):
        problem = line if isinstance(line, Problem) else log.add(line)
        if problem is not None:
            yield problem
    nodes = log.nodes()
    for node in rootless(nodes):
        yield log.problem(node.line, "the line's parents form a cycle")
    sessions: dict[str, list[Node]] = {}
    for tree in trees(nodes):
        sessions.setdefault(log.session_id(tree[0]), []).extend(tree)
    for session_id, members in sessions.items():
        yield from _session(path, session_id, members)
    if not sessions:
        yield from _session(path, path.stem, [])


def _session(path: Path, session_id: str, nodes: Sequence[Node]) -> Recording:
    origin = Origin(
        session_id=session_id,
        format=RecordingFormat.CLAUDE_CODE,
        source=str(path),
        line=nodes[0].line if nodes else None,
    )
    yield from session_of(entries_of(nodes), origin, tools=[])
