"""From the messages of a conversation to its turns: prompt, response and what followed it.

Each assistant message is exactly one turn, however many paths lead through it. The rules here are
the same for all formats. Pure: nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from opd.replay.recordings.checks import results_without_calls
from opd.replay.recordings.entries import Entry, Origin, belongs_in_next_state
from opd.replay.recordings.recorded import ImportProblem, Problem, RecordedSession, RecordedTurn
from records.messages import Message


def session_of(
    entries: Sequence[Entry],
    origin: Origin,
    *,
    tools: list[dict[str, Any]],
    outcome_reward: float | None = None,
    data_source: str | None = None,
) -> Iterator[RecordedSession | Problem]:
    """The problems of a conversation, then the session, if it has a turn.

    `entries` come after their parents. A message's problem makes the turns unusable whose prompt
    contains it, and the message's own turn; turns before it keep what they can of it as next state.
    """
    if not entries:
        yield origin.problem(ImportProblem.NO_MESSAGES, "the session contains no messages")
        return
    entries = _with_missing_calls(entries)
    problems = {
        entry.position: origin.problem(*entry.fault, entry.position, entry.line)
        for entry in entries
        if entry.fault is not None
    }
    yield from problems.values()
    turns = _turns(entries, problems, tools, data_source)
    if not turns:
        detail = "the session contains no assistant message"
        yield origin.problem(ImportProblem.NO_ASSISTANT_TURN, detail)
        return
    if not tools and any(entry.message.get("tool_calls") for entry in entries):
        yield missing_tools(origin)
    yield RecordedSession(
        session_id=origin.session_id,
        format=origin.format,
        source=origin.source,
        line=origin.line,
        turns=tuple(turns),
        outcome_reward=outcome_reward,
    )


def missing_tools(origin: Origin) -> Problem:
    """Tools are called but none is defined. The turns train: templates need no definitions."""
    detail = "tools are called but none is defined; its prompts are rendered without definitions"
    return origin.problem(ImportProblem.MISSING_TOOLS, detail)


def _with_missing_calls(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with a fault on tool results that answer no call."""
    marked = list(entries)
    for index, fault in results_without_calls(entry.message for entry in entries):
        if marked[index].fault is None:
            marked[index] = replace(marked[index], fault=fault)
    return marked


def _turns(
    entries: Sequence[Entry],
    problems: dict[int, Problem],
    tools: list[dict[str, Any]],
    data_source: str | None,
) -> list[RecordedTurn]:
    by_position = {entry.position: entry for entry in entries}
    children: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.parent is not None:
            children.setdefault(entry.parent, []).append(entry)
    turns: dict[int, RecordedTurn] = {}
    for entry in filter(lambda entry: entry.is_turn, entries):
        since, before = _since_turn_before(entry, by_position, turns)
        context = _after_summary(since, by_position)
        messages = [element.message for element in (since if context is None else context)]
        found = [problems.get(element.position) for element in (context or since)]
        if before is not None and context is None:
            messages = [*before.messages, before.response, *messages]
            found.insert(0, before.problem)
        turns[entry.position] = RecordedTurn(
            position=entry.position,
            parent=None if before is None else before.position,
            messages=messages,
            tools=tools,
            response=entry.message,
            next_state=_next_state(entry, children),
            data_source=data_source,
            problem=next(filter(None, [*found, problems.get(entry.position)]), None),
        )
    return list(turns.values())


def _since_turn_before(
    entry: Entry, by_position: dict[int, Entry], turns: dict[int, RecordedTurn]
) -> tuple[list[Entry], RecordedTurn | None]:
    """The entries between `entry` and the turn that it continues, in order, and that turn."""
    since: list[Entry] = []
    position = entry.parent
    while position is not None and position not in turns:
        since.append(by_position[position])
        position = by_position[position].parent
    return since[::-1], None if position is None else turns[position]


def _after_summary(since: Sequence[Entry], by_position: dict[int, Entry]) -> list[Entry] | None:
    """The whole prompt that ends with `since`, if the newest summary is in it; else None."""
    for index in reversed(range(len(since))):
        summary = since[index]
        if summary.is_summary:
            return [summary, *_kept(summary, by_position), *since[index + 1 :]]
    return None


def _kept(summary: Entry, by_position: dict[int, Entry]) -> list[Entry]:
    """What a summary keeps of the entries before it, in order."""
    kept: list[Entry] = []
    position = summary.parent
    while summary.kept_from is not None and position is not None and position >= summary.kept_from:
        if not by_position[position].is_summary:
            kept.append(by_position[position])
        position = by_position[position].parent
    return kept[::-1]


def _next_state(entry: Entry, children: dict[int, list[Entry]]) -> list[Message]:
    """What followed until the next assistant message; if the path forks, what came first."""
    messages: list[Message] = []
    following = children.get(entry.position, ())
    while following and following[0].message["role"] != "assistant":
        first = following[0]
        if not first.is_summary and belongs_in_next_state(first.fault):
            messages.append(first.message)
        following = children.get(first.position, ())
    return messages
