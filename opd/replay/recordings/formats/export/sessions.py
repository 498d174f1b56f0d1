"""This project's own export of its records: one JSON object per line, one line per session.

A line is UTF-8 JSON without NaN or Infinity. Its fields:

    format           "hindsight-opd-export"
    version          2, or 1, in which turns are objects; any other is a problem of the line
    session_id       text
    outcome_reward   number, or null
    renderer         fingerprint of the tokenizer and template of all ids; null or empty if the
                     line has no ids
    turns            list of turns, each the JSON text of an object, so that a file opens as a
                     table whatever agents sent; a parent comes before its children

A turn's fields. Those without "optional" are required.

    turn_id          text, unique in the line
    parent_turn_id   the turn that this one continues, or null
    position         whole number >= 0, unique in the line: what a votes file calls `message_index`.
                     A store numbers its turns in the order in which they were recorded
    shared_messages  optional, 0. The prompt begins with this many messages of the parent's
                     conversation, which is the parent's prompt messages and then its response
    messages         the rest of the prompt, OpenAI chat messages; all of it if nothing is shared
    tools            optional list of OpenAI tool definitions. Absent: the parent's, [] without one
    response         the assistant message
    next_state       the messages that followed until the next assistant message, [] for none, then
                     those of feedback, with the role "feedback"
    turn_type        optional, "main". "side" and "text" turns are context and do not train
    prompt_ids       optional, null. With `shared_ids`, what follows the shared ids
    shared_ids       optional, 0. The prompt ids begin with this many of the parent's
                     prompt_ids + response_ids
    response_ids     ids as sampled, stop token included; present if prompt_ids is
    rollout_logprobs optional, null. One finite number for each response id: natural log,
                     at `temperature`. Null if one is missing: there is no placeholder
    temperature      optional, 1.0; the sampling temperature, above 0
    distribution_modified  optional, null. What kept the response from being sampled from the plain
                     softmax (top-p, a grammar). Log-probs of such a turn are read as null
    votes            optional, null. Raw texts of the judge's votes, in their order
    sampling         optional, null. Only its `enable_thinking` is read: true or false if the
                     request set the chat template's switch of that name, else null or absent
    data_source      optional, null. Where the task comes from; it may choose the teacher again

These are written for people and other programs, and are not read back, because a replay makes them
again: `version_spans` ([[version, start, end], ...]), `state`, `drop_reason`, `drop_detail`,
`hint`, `teacher_key` (the teacher that the client or a route named, null for the default one),
`teacher` (who scored it, null before that), `finish_reason`, `created_at`. Any other field is
ignored too, so that a later writer of version 1 may add some.

A redacted turn has its messages as they are stored and no ids. A deleted one is left out, with
`parent_turn_id` null and nothing shared in the turns that continued it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opd.replay.recordings.conversation import missing_tools
from opd.replay.recordings.entries import Origin
from opd.replay.recordings.formats.export.fields import ExportedSession
from opd.replay.recordings.formats.export.turns import TurnReading
from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, Line, read_lines
from opd.replay.recordings.recorded import (
    ImportProblem,
    Problem,
    RecordedSession,
    Recording,
    RecordingFormat,
)
from records.json_text import parse_json

NAME = "hindsight-opd-export"
VERSIONS = (1, 2)


def is_export(value: dict[str, Any]) -> bool:
    """Whether a line is in this format, in any version."""
    return value.get("format") == NAME


def read_export(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Recording:
    """The sessions of `path`, one line at a time."""
    for line in read_lines(path, max_line_bytes):
        if isinstance(line, Problem):
            yield line
        else:
            yield from _session(path, line)


def _session(path: Path, line: Line) -> Recording:
    """The problems of a line, then its session, if it has a turn."""
    try:
        session = _checked(line.value)
    except ValueError as error:
        detail = _first(error) if isinstance(error, ValidationError) else str(error)
        yield Problem(
            source=str(path), line=line.number, reason=ImportProblem.BAD_SHAPE, detail=detail
        )
        return
    origin = Origin(
        session_id=session.session_id,
        format=RecordingFormat.EXPORT,
        source=str(path),
        line=line.number,
    )
    reading = TurnReading(origin, session.renderer, session.turns)
    for index, raw in enumerate(session.turns):
        yield from reading.add(index, raw)
    turns = reading.turns()
    if not turns:
        yield origin.problem(ImportProblem.NO_ASSISTANT_TURN, "no turn of the session can be read")
        return
    if session.renderer is None and any("prompt_ids" in raw for raw in session.turns):
        detail = "'renderer' is null, so its ids have no known tokenizer and are not used"
        yield origin.problem(ImportProblem.BAD_SHAPE, detail)
    if any(turn.response.get("tool_calls") and not turn.tools for turn in turns):
        yield missing_tools(origin)
    yield RecordedSession(
        session_id=session.session_id,
        format=RecordingFormat.EXPORT,
        source=str(path),
        line=line.number,
        turns=turns,
        outcome_reward=session.outcome_reward,
    )


def _checked(value: dict[str, Any]) -> ExportedSession:
    """The fields of a line. Raises ValueError, in words, if it is not of a known version."""
    if not is_export(value):
        raise ValueError(f"the line's 'format' is not {NAME!r}")
    if value.get("version") not in VERSIONS:
        found = value.get("version")
        raise ValueError(f"version {found!r} of the export, but this program reads {VERSIONS}")
    session = ExportedSession.model_validate(value)
    turns = [_parsed(turn) for turn in session.turns]
    return session.model_copy(update={"turns": turns, "renderer": session.renderer or None})


def _parsed(turn: Any) -> Any:
    """The value of a turn that is JSON text; anything else unchanged."""
    if not isinstance(turn, str):
        return turn
    try:
        return parse_json(turn)
    except ValueError:
        return turn


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
