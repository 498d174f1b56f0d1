"""One session of an export: its turns, each joined with what it shares with its parent.

`sessions.py` describes a line. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from opd.replay.recordings.checks import (
    Fault,
    checked_message,
    checked_tools,
    results_without_calls,
)
from opd.replay.recordings.entries import Origin, belongs_in_next_state
from opd.replay.recordings.formats.export.fields import ExportedTurn
from opd.replay.recordings.recorded import ImportProblem, Problem, RecordedTokens, RecordedTurn
from records.messages import Message
from records.types import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A turn and what its children share: its prompt and response, each message with its problem,
    and the ids of both.
    """

    turn: RecordedTurn
    conversation: list[tuple[Message, Problem | None]]
    ids: Ids | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notes:
    """The problems found in one turn."""

    origin: Origin
    position: int
    problems: list[Problem]

    def add(self, where: str, fault: Fault | None) -> Problem | None:
        """A fault as a problem, kept with the others; None without one."""
        if fault is None:
            return None
        detail = f"{where}: {fault.detail}"
        self.problems.append(self.origin.problem(fault.reason, detail, self.position))
        return self.problems[-1]


class TurnReading:
    """Takes in the turns of one line in order."""

    def __init__(self, origin: Origin, renderer: str | None, turns: list[Any]) -> None:
        self._origin = origin
        self._renderer = renderer
        named = (turn.get("parent_turn_id") for turn in turns if isinstance(turn, dict))
        self._parents = {name for name in named if isinstance(name, str)}
        self._taken: dict[str, _Taken] = {}
        self._positions: set[int] = set()

    def turns(self) -> tuple[RecordedTurn, ...]:
        """The turns so far."""
        return tuple(taken.turn for taken in self._taken.values())

    def add(self, index: int, raw: Any) -> list[Problem]:
        """Take in a turn; returns its problems. A turn whose shape is wrong is left out."""
        try:
            exported = ExportedTurn.model_validate(raw)
            notes = _Notes(origin=self._origin, position=exported.position, problems=[])
            self._taken[exported.turn_id] = self._take(exported, notes)
            self._positions.add(exported.position)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the turn"
            return [self._left_out(raw, f"turns[{index}]: {where}: {first['msg']}")]
        except ValueError as error:
            return [self._left_out(raw, f"turns[{index}]: {error}")]
        return notes.problems

    def _left_out(self, raw: Any, detail: str) -> Problem:
        position = raw.get("position") if isinstance(raw, dict) else None
        position = position if isinstance(position, int) else None
        return self._origin.problem(ImportProblem.BAD_SHAPE, detail, position)

    def _take(self, exported: ExportedTurn, notes: _Notes) -> _Taken:
        """Raises ValueError for a turn that does not fit those before it."""
        if exported.turn_id in self._taken or exported.position in self._positions:
            raise ValueError("another turn of the line has this turn_id or position")
        parent = self._parent(exported)
        prompt = _prompt(exported, parent, notes)
        tokens = _tokens(exported, parent, self._renderer or "")
        response, problem = _response(exported, notes)
        in_prompt = next(filter(None, (problem for _, problem in prompt)), None)
        turn = RecordedTurn(
            position=exported.position,
            parent=None if parent is None else parent.turn.position,
            messages=[message for message, _ in prompt],
            tools=_tools(exported, parent),
            response=response,
            next_state=self._next_state(exported, notes),
            tokens=tokens if self._renderer is not None else None,
            votes=None if exported.votes is None else tuple(exported.votes),
            enable_thinking=exported.sampling and exported.sampling.enable_thinking,
            data_source=exported.data_source,
            problem=in_prompt or problem or _side_turn(exported, notes),
        )
        ids = None if tokens is None else np.concatenate([tokens.prompt_ids, tokens.response_ids])
        return _Taken(turn=turn, conversation=[*prompt, (response, problem)], ids=ids)

    def _parent(self, exported: ExportedTurn) -> _Taken | None:
        """The parent, if it was taken in. Raises ValueError if something is shared without a
        parent.
        """
        parent = self._taken.get(exported.parent_turn_id or "")
        if parent is None and (exported.shared_messages or exported.shared_ids):
            raise ValueError(f"its parent {exported.parent_turn_id!r} was not taken in before it")
        return parent

    def _next_state(self, exported: ExportedTurn, notes: _Notes) -> list[Message]:
        checked = [checked_message(message, feedback=True) for message in exported.next_state]
        if exported.turn_id not in self._parents:
            # Those of other turns are in the prompts of their children, and reported there.
            for index, (_, fault) in enumerate(checked):
                notes.add(f"next_state[{index}]", fault)
        return [message for message, fault in checked if belongs_in_next_state(fault)]


def _prompt(
    exported: ExportedTurn, parent: _Taken | None, notes: _Notes
) -> list[tuple[Message, Problem | None]]:
    """The messages of the whole prompt, each with its problem."""
    before = [] if parent is None else parent.conversation
    shared = exported.shared_messages
    if shared > len(before):
        raise ValueError(f"shared_messages is {shared}, but its parent has {len(before)}")
    checked = [checked_message(message) for message in exported.messages]
    messages = [message for message, _ in (*before[:shared], *checked)]
    orphans = dict(results_without_calls(messages))
    prompt = before[:shared]
    for index, (message, fault) in enumerate(checked, start=shared):
        prompt.append((message, notes.add(f"messages[{index}]", fault or orphans.get(index))))
    return prompt


def _tools(exported: ExportedTurn, parent: _Taken | None) -> list[dict[str, Any]]:
    if exported.tools is None:
        return [] if parent is None else parent.turn.tools
    tools, fault = checked_tools(exported.tools)
    if fault is not None:
        raise ValueError(fault.detail)
    return tools


def _tokens(exported: ExportedTurn, parent: _Taken | None, renderer: str) -> RecordedTokens | None:
    """The ids of the whole prompt and of the response, if the line has them."""
    if exported.prompt_ids is None or exported.response_ids is None:
        return None
    before = None if parent is None else parent.ids
    prompt_ids = np.array(exported.prompt_ids, np.int32)
    if exported.shared_ids:
        if before is None or exported.shared_ids > len(before):
            raise ValueError(f"shared_ids is {exported.shared_ids}, but its parent has fewer ids")
        prompt_ids = np.concatenate([before[: exported.shared_ids], prompt_ids])
    logprobs = exported.rollout_logprobs if exported.distribution_modified is None else None
    return RecordedTokens(
        prompt_ids=prompt_ids,
        response_ids=np.array(exported.response_ids, np.int32),
        rollout_logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        temperature=exported.temperature,
        renderer=renderer,
    )


def _response(exported: ExportedTurn, notes: _Notes) -> tuple[Message, Problem | None]:
    response, fault = checked_message(exported.response)
    if fault is None and response["role"] != "assistant":
        fault = Fault(ImportProblem.BAD_SHAPE, "a response must have the role 'assistant'")
    return response, notes.add("response", fault)


def _side_turn(exported: ExportedTurn, notes: _Notes) -> Problem | None:
    if exported.turn_type == "main":
        return None
    fault = Fault(ImportProblem.SIDE_TURN, "context for others, and not trained")
    return notes.add(f"{exported.turn_type} turn", fault)
