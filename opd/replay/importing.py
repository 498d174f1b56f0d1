"""Recorded sessions -> rows of the store: texts become ids once, here.

Each turn's prompt extends the ids of the turn before it if the template allows that, as it would
live, so that a session is one sequence. Secrets and personal data are removed from the texts before
they become ids: a turn stays usable with a redacted history, but a response that contained some
does not train. A recording's own ids are used if they have the same tokenizer, template and
settings. Turn ids are content hashes: a second import of the same session adds nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from opd.replay.recordings.recorded import ImportProblem, Problem, RecordedSession, RecordedTurn
from records.messages import Message, path_ids
from records.names import DropReason, TurnType
from records.privacy.redaction import Redactor
from records.reading.replaying import PreparedSession
from records.turns.recording import Recording, RecordingKind
from records.turns.turn_writes import NextState, prepare
from records.types import CapturedTurn, Ids
from rollout_bridge.config import TeacherRoutes
from rollout_bridge.rendering.rendering import Rendering

SCOPE = "recorded"
"""The scope of recorded conversations, separate from those of all API keys."""
_TICK_S = 1e-6
"""Turns of a session are created in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """`context_length` is the most tokens of prompt and response; `renderer` names the ids that may
    be used as they are; `routes` choose teachers for turns.
    """

    context_length: int | None
    held_out: float
    renderer: str
    routes: TeacherRoutes = field(default_factory=TeacherRoutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImport:
    """A session as rows (None: nothing of it can be imported), and what is wrong with the rest."""

    rows: PreparedSession | None
    problems: tuple[Problem, ...]
    num_tokens: int


def session_key(name: str) -> str:
    """The store's id of the recorded session `name`."""
    return "rec_" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:28]


def is_held_out(name: str, share: float) -> bool:
    """Whether a session is never trained on: by its name only, so the same in every run."""
    digest = hashlib.sha256(b"held out:" + name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def prepare_session(
    session: RecordedSession,
    rendering: Rendering,
    redactor: Redactor,
    settings: ImportSettings,
    now: float,
) -> PreparedImport:
    """Pure except for the redactor's counts; takes a while for a long session."""
    importer = _SessionImport(session, rendering, redactor, settings, now)
    return importer.prepared()


class _SessionImport:
    """One session on its way into rows."""

    def __init__(
        self,
        session: RecordedSession,
        rendering: Rendering,
        redactor: Redactor,
        settings: ImportSettings,
        now: float,
    ) -> None:
        self._session, self._rendering, self._redactor = session, rendering, redactor
        self._settings, self._now = settings, now
        self._by_position: dict[int, CapturedTurn] = {}
        self._next_states: list[NextState] = []
        self._problems: list[Problem] = []

    def prepared(self) -> PreparedImport:
        for turn in self._session.turns:
            if turn.problem is not None:
                continue  # reported by the reader
            try:
                self._add(turn)
            except _NotTaken as reason:
                self._problems.append(self._problem(turn, reason))
        turns = {turn.turn_id: turn for turn in self._by_position.values()}
        if not turns:
            return PreparedImport(rows=None, problems=tuple(self._problems), num_tokens=0)
        rows = PreparedSession(
            session_id=session_key(self._session.session_id),
            scope=SCOPE,
            name=self._session.session_id,
            now=self._now,
            turns=tuple(
                prepare(turn, scope=SCOPE, now=self._now + number * _TICK_S)
                for number, turn in enumerate(turns.values())
            ),
            next_states=tuple(self._next_states),
            outcome=self._outcome(),
        )
        num_tokens = sum(len(one.response_ids) for one in turns.values()) + sum(
            len(one.prompt_ids) - one.num_shared_ids for one in turns.values()
        )
        return PreparedImport(rows=rows, problems=tuple(self._problems), num_tokens=num_tokens)

    def _outcome(self) -> float | None:
        """The session's outcome; a number outside [0, 1] is a problem."""
        value = self._session.outcome_reward
        if value is None or 0.0 <= value <= 1.0:
            return value
        self._problems.append(
            Problem(
                source=self._session.source,
                reason=ImportProblem.BAD_OUTCOME,
                detail=f"outcome_reward {value!r} is not a number from 0 to 1: the session is "
                "imported without it",
                line=self._session.line,
                session_id=self._session.session_id,
            )
        )
        return None

    def _problem(self, turn: RecordedTurn, reason: _NotTaken) -> Problem:
        return Problem(
            source=self._session.source,
            reason=reason.reason,
            detail=reason.detail,
            line=self._session.line,
            session_id=self._session.session_id,
            position=turn.position,
        )

    def _add(self, turn: RecordedTurn) -> None:
        messages = self._redactor.messages(turn.messages)
        tools = [dict(tool) for tool in self._redactor.messages(turn.tools)]
        [response] = self._redactor.messages([turn.response])
        clean = replace(turn, messages=messages, tools=tools, response=response)
        is_changed = (messages, tools, response) != (turn.messages, turn.tools, turn.response)
        captured = self._captured(
            clean, holds_findings=response != turn.response, changed=is_changed
        )
        self._by_position[turn.position] = captured
        if turn.next_state:
            self._next_states.append(
                NextState(
                    turn_id=captured.turn_id,
                    messages=self._redactor.messages(turn.next_state),
                    now=self._now,
                )
            )

    def _captured(self, turn: RecordedTurn, *, holds_findings: bool, changed: bool) -> CapturedTurn:
        parent = None if turn.parent is None else self._by_position.get(turn.parent)
        tokens = turn.tokens
        logprobs = None
        rendering = self._rendering_of(turn)
        if tokens is not None and not changed and tokens.renderer == self._settings.renderer:
            prompt_ids, response_ids = tokens.prompt_ids, tokens.response_ids
            logprobs = tokens.rollout_logprobs
        else:
            prompt_ids, response_ids = _rendered(rendering, turn, parent)
        limit = self._settings.context_length
        if limit is not None and len(prompt_ids) + len(response_ids) > limit:
            raise _NotTaken(
                ImportProblem.TOO_LONG,
                f"{len(prompt_ids)} prompt and {len(response_ids)} response tokens, "
                f"the model takes {limit}",
            )
        shared = _shared(parent, prompt_ids)
        node = path_ids(SCOPE, [*turn.messages, turn.response])[-1]
        turn_id = hashlib.sha256(f"{self._session.session_id}\0{node}".encode()).hexdigest()[:32]
        has_logprobs = logprobs is not None
        sampling: dict[str, Any] = {
            "temperature": tokens.temperature if tokens and has_logprobs else 1.0
        }
        if turn.enable_thinking is not None:  # hinting renders the prompt again
            sampling["enable_thinking"] = turn.enable_thinking
        return CapturedTurn(
            turn_id=f"rec_{turn_id[4:]}",
            session_id=session_key(self._session.session_id),
            parent_turn_id=parent.turn_id if parent else None,
            turn_type=TurnType.MAIN,
            messages=turn.messages,
            tools=turn.tools,
            response=turn.response,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            rollout_logprobs=(
                logprobs
                if logprobs is not None
                else np.full(len(response_ids), np.nan, dtype=np.float32)
            ),
            token_parent_id=parent.turn_id if parent and shared else None,
            num_shared_ids=shared,
            sampling=sampling,
            distribution_modified=None,
            version_spans=(),
            finish_reason="tool_calls" if turn.response.get("tool_calls") else "stop",
            latency_s=None,
            drop_reason=DropReason.SENSITIVE if holds_findings else None,
            findings={},
            teacher_key=self._settings.routes.teacher_of(
                source=turn.data_source,
                key=None,
                tools=[tool["function"]["name"] for tool in turn.tools],
            ),
            data_source=turn.data_source,
            recording=Recording(
                kind=(
                    RecordingKind.RECORDED_WITH_LOGPROBS if has_logprobs else RecordingKind.RECORDED
                ),
                source=self._session.format.value,
                position=turn.position,
                held_out=is_held_out(self._session.session_id, self._settings.held_out),
                votes=turn.votes,
            ),
        )

    def _rendering_of(self, turn: RecordedTurn) -> Rendering:
        try:
            return self._rendering.with_thinking(turn.enable_thinking)
        except ValueError as error:
            raise _NotTaken(ImportProblem.UNRENDERABLE, str(error)) from error


class _NotTaken(Exception):
    """A turn cannot be imported."""

    def __init__(self, reason: ImportProblem, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def _rendered(
    rendering: Rendering, turn: RecordedTurn, parent: CapturedTurn | None
) -> tuple[Ids, Ids]:
    """Prompt and response ids; the prompt extends the parent's if both are rendered alike."""
    try:
        prompt_ids = None
        if (
            parent is not None
            and parent.tools == turn.tools
            and parent.sampling.get("enable_thinking") == turn.enable_thinking
        ):
            added = _added_messages(parent, turn.messages)
            if added:
                prompt_ids = rendering.extend(
                    parent.prompt_ids, parent.response_ids, added, turn.tools
                )
        if prompt_ids is None:
            prompt_ids = rendering.prompt_ids(turn.messages, turn.tools)
        response_ids = rendering.recorded_response_ids(
            turn.messages, turn.response, turn.tools, prompt_ids
        )
    except ValueError as error:
        raise _NotTaken(ImportProblem.UNRENDERABLE, str(error)) from error
    return prompt_ids, response_ids


def _added_messages(parent: CapturedTurn, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What follows the parent's response in `messages`; nothing if they do not continue it."""
    before = [*parent.messages, parent.response]
    return list(messages[len(before) :]) if messages[: len(before)] == before else []


def _shared(parent: CapturedTurn | None, prompt_ids: Ids) -> int:
    """Ids of the whole parent if the prompt begins with them, else 0."""
    if parent is None:
        return 0
    before = np.concatenate([parent.prompt_ids, parent.response_ids])
    if len(before) > len(prompt_ids) or not np.array_equal(before, prompt_ids[: len(before)]):
        return 0
    return len(before)
