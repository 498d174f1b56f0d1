"""What a file of recordings contains, in any format: sessions of turns, and what is wrong in it.

Readers (formats/) make these values; importing turns them into rows of the store. They use no
tokenizer: ids are there only if the recording itself contains them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from records.messages import Message
from records.types import Ids, Logprobs


class RecordingFormat(StrEnum):
    """The formats that are read; the value is the name that users see."""

    OPENAI_CHAT = "openai-chat"
    EXPORT = "export"
    OPENCLAW_RL = "openclaw-rl"
    OPENCLAW = "openclaw"
    CLAUDE_CODE = "claude-code"


class ImportProblem(StrEnum):
    """Why a line, a session or a turn of a recording is not imported. The set is closed."""

    # Of a line or a file
    UNREADABLE = "unreadable"
    UNKNOWN_FORMAT = "unknown_format"
    LINE_TOO_LONG = "line_too_long"
    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    BAD_SHAPE = "bad_shape"
    # Of a session
    NO_MESSAGES = "no_messages"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    # Of a message, and of the turns whose prompt it is in
    UNKNOWN_ROLE = "unknown_role"
    IMAGE = "image"
    EMPTY_MESSAGE = "empty_message"
    TOOL_RESULT_WITHOUT_CALL = "tool_result_without_call"
    BAD_TOOL_CALL = "bad_tool_call"
    FORGOTTEN = "forgotten"
    # Of a session whose turns train anyway
    MISSING_TOOLS = "missing_tools"
    SAME_SESSION_ID = "same_session_id"
    BAD_OUTCOME = "bad_outcome"
    OTHER_OUTCOME = "other_outcome"
    # Of a turn
    SIDE_TURN = "side_turn"
    UNRENDERABLE = "unrenderable"
    TOO_LONG = "too_long"
    # Of votes that are kept separately from the sessions
    VOTES_WITHOUT_TURN = "votes_without_turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not imported. `line` counts from 1, `position` is the message's index.

    A reader yields each once, before its session. Turns that it makes unusable have the same value
    in `RecordedTurn.problem`. So to count reasons, count what the reader yields; to count turns,
    count those with a problem.
    """

    source: str
    reason: ImportProblem
    detail: str
    line: int | None = None
    session_id: str | None = None
    position: int | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.reason.value}: {self.detail}"

    @property
    def place(self) -> str:
        """File, line, session and message, if known."""
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        if self.session_id is not None:
            place += f" session {self.session_id}"
        if self.position is not None:
            place += f" message {self.position}"
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTokens:
    """The ids that a recording contains of one turn: prompt_ids [P], response_ids [R] and, if it
    has them, rollout_logprobs [R] at `temperature`. `renderer` is the fingerprint of their
    tokenizer and template: if it is another one, the texts are rendered again.
    """

    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs | None
    temperature: float
    renderer: str

    def __post_init__(self) -> None:
        if self.rollout_logprobs is not None and len(self.rollout_logprobs) != len(
            self.response_ids
        ):
            raise ValueError(
                f"{len(self.response_ids)} response ids but "
                f"{len(self.rollout_logprobs)} rollout log-probs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One assistant message: its prompt `messages`, the `response`, and what followed until the
    next assistant message (`next_state`, empty at the end).

    `position` is the response's index in its conversation, or its number in the recording; no other
    turn of its session has it. `parent` is the position of the turn that this one continues, which
    comes before it; None: the first. Turns of edited or repeated requests share a parent. `votes`
    are raw texts of a judge, if the recording has some. `enable_thinking` is the chat template's
    switch that the request set, None if it set none. `data_source` is where its task comes from, as
    recorded. `problem` is why it cannot train although it is context for others.
    """

    position: int
    parent: int | None
    messages: list[Message]
    tools: list[dict[str, Any]]
    response: Message
    next_state: list[Message]
    tokens: RecordedTokens | None = None
    votes: tuple[str, ...] | None = None
    enable_thinking: bool | None = None
    data_source: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """One conversation of a recording, its turns in order; `outcome_reward` as recorded."""

    session_id: str
    format: RecordingFormat
    source: str
    line: int | None
    turns: tuple[RecordedTurn, ...]
    outcome_reward: float | None = None


Recording: TypeAlias = Iterator[RecordedSession | Problem]
"""What a reader yields, in the order of the file, never more than one session in memory."""
