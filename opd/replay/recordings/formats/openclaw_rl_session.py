"""One session of OpenClaw-RL's records: from the records of its turns to the turns.

`openclaw_rl.py` describes the records. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from opd.replay.recordings.checks import Fault, checked_message, results_without_calls
from opd.replay.recordings.conversation import missing_tools
from opd.replay.recordings.entries import Origin, belongs_in_next_state
from opd.replay.recordings.recorded import ImportProblem, Problem, RecordedSession, RecordedTurn
from records.messages import Message

_END_TOKEN = re.compile(r"<\|[^<>|]*\|>\s*$")
_TOOL_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
_THINKING = re.compile(r"^\s*(?:<think>)?(.*?)</think>", re.DOTALL)


class SessionReading:
    """The records of one session on their way to its turns."""

    def __init__(self, origin: Origin, lines: Sequence[int]) -> None:
        self.origin = origin
        self.lines = lines
        self.problems: dict[tuple[str, ImportProblem], Problem] = {}
        self.raw: list[Any] = []
        self.checked: list[tuple[Message, Fault | None]] = []

    def session(self, records: Iterator[dict[str, Any]]) -> Iterator[RecordedSession | Problem]:
        """Everything wrong with the session's messages, then the session."""
        turns: list[RecordedTurn] = []
        record = next(records, None)
        for line in self.lines:
            assert record is not None
            following = next(records, None)
            turns.append(self._turn(record, following, line, turns))
            record = following
        yield from self.problems.values()
        if any(
            message.get("tool_calls")
            for turn in turns
            for message in (turn.response, *turn.messages)
        ):
            yield missing_tools(self.origin)
        yield RecordedSession(
            session_id=self.origin.session_id,
            format=self.origin.format,
            source=self.origin.source,
            line=self.origin.line,
            turns=tuple(turns),
        )

    def _turn(
        self,
        record: dict[str, Any],
        following: dict[str, Any] | None,
        line: int,
        turns: list[RecordedTurn],
    ) -> RecordedTurn:
        position = record["turn"]
        faults = self._check_prompt(record["messages"])
        response, response_fault = checked_message(_response(record))
        if response_fault is not None:
            faults.append(("response", response_fault))
        next_state, next_faults = _next_state(record, following)
        problems = [self._problem(where, fault, position, line) for where, fault in faults]
        for where, fault in next_faults:
            self._problem(where, fault, position, line)
        return RecordedTurn(
            position=position,
            parent=position - 1 if turns and turns[-1].position == position - 1 else None,
            messages=[message for message, _ in self.checked],
            tools=[],
            response=response,
            next_state=next_state,
            problem=problems[0] if problems else None,
        )

    def _check_prompt(self, raw: list[Any]) -> list[tuple[str, Fault]]:
        """Take in a request's messages; those that the request before also had are not held twice.

        Returns the place and the fault of each that has one.
        """
        shared = 0
        for before, now in zip(self.raw, raw, strict=False):
            if before != now:
                break
            shared += 1
        self.raw = raw
        self.checked = [*self.checked[:shared], *map(checked_message, raw[shared:])]
        faults = [(i, fault) for i, (_, fault) in enumerate(self.checked) if fault is not None]
        faults += results_without_calls(message for message, _ in self.checked)
        return [(f"messages[{index}]", fault) for index, fault in sorted(faults)]

    def _problem(self, where: str, fault: Fault, position: int, line: int) -> Problem:
        """The problem of a place, the same one as long as the requests repeat it."""
        key = (where if where.startswith("messages") else f"{position} {where}", fault.reason)
        if key not in self.problems:
            detail = f"{where}: {fault.detail}"
            self.problems[key] = self.origin.problem(fault.reason, detail, position, line)
        return self.problems[key]


def _response(record: dict[str, Any]) -> dict[str, Any]:
    """The response as a message: the text without what the template writes around it."""
    text = record["response_text"]
    while (shorter := _END_TOKEN.sub("", text)) != text:
        text = shorter
    message: dict[str, Any] = {"role": "assistant"}
    thinking = _THINKING.match(text)
    if thinking is not None:
        message["reasoning_content"] = thinking[1].strip()
        text = text[thinking.end() :]
    if record.get("tool_calls"):
        text = _TOOL_CALL.sub("", text)
        message["tool_calls"] = record["tool_calls"]
    return {**message, "content": text.strip()}


def _next_state(
    record: dict[str, Any], following: dict[str, Any] | None
) -> tuple[list[Message], list[tuple[str, Fault]]]:
    """The messages after the response, and what is wrong in them."""
    recorded = record.get("next_state")
    if recorded is None:
        return [], []
    raw = [recorded]
    if following is not None and following["turn"] == record["turn"] + 1:
        tail = _after_last_assistant(following["messages"])
        raw = tail if tail and tail[-1] == recorded else raw
    checked = [checked_message(message) for message in raw]
    # What the next record repeats is reported there.
    faults = (
        []
        if raw[0] is not recorded
        else [("next_state", fault) for _, fault in checked if fault is not None]
    )
    return [message for message, fault in checked if belongs_in_next_state(fault)], faults


def _after_last_assistant(messages: list[Any]) -> list[Any]:
    """What follows the newest assistant message; nothing if there is none."""
    for index in reversed(range(len(messages))):
        message = messages[index]
        if isinstance(message, dict) and message.get("role") == "assistant":
            return messages[index + 1 :]
    return []
