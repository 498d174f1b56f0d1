"""The messages of a conversation on their way to turns, and where they come from.

A conversation is a tree of entries, one per message; most are a single path. Formats (formats/)
make the entries; `conversation.py` makes turns from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opd.replay.recordings.checks import Fault, checked_message
from opd.replay.recordings.recorded import ImportProblem, Problem, RecordingFormat
from records.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One message of a conversation. `parent` is the position of the entry before it.

    A summary replaces what is before it: the prompt after it begins with it, then come the entries
    of its path from position `kept_from` on (None: none), then what follows; it is not a reaction
    to the response before it. An assistant message that no model sampled is context, not a turn.
    """

    position: int
    parent: int | None
    message: Message
    fault: Fault | None = None
    line: int | None = None
    is_summary: bool = False
    kept_from: int | None = None
    is_sampled: bool = True

    @property
    def is_turn(self) -> bool:
        """Whether the message is an answer that a model sampled."""
        return self.message["role"] == "assistant" and self.is_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a session and its problems come from."""

    session_id: str
    format: RecordingFormat
    source: str
    line: int | None

    def problem(
        self,
        reason: ImportProblem,
        detail: str,
        position: int | None = None,
        line: int | None = None,
    ) -> Problem:
        """A problem of this session; of its own line unless another is named."""
        return Problem(
            source=self.source,
            line=self.line if line is None else line,
            session_id=self.session_id,
            position=position,
            reason=reason,
            detail=detail,
        )


def path_entries(messages: Sequence[Any]) -> list[Entry]:
    """The entries of a conversation that is one list of messages; positions are its indices."""
    entries = []
    for position, raw in enumerate(messages):
        message, fault = checked_message(raw)
        parent = position - 1 if position else None
        entries.append(Entry(position=position, parent=parent, message=message, fault=fault))
    return entries


def belongs_in_next_state(fault: Fault | None) -> bool:
    """Whether a message with this fault can be shown to a judge: its role is known."""
    return fault is None or fault.reason not in (
        ImportProblem.UNKNOWN_ROLE,
        ImportProblem.BAD_SHAPE,
    )
