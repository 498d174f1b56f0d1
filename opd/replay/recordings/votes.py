"""A judge's votes that are kept separately from the sessions: one JSON object per line and turn.

A line has `session_id`, `message_index` (the position of the response in its conversation, from 0)
and `votes`, the judge's raw texts. A record file of OpenClaw-RL's judge is read too
(`openclaw-opd/openclaw_opd_api_server.py`, `_append_prm_record`): `session_id`, `turn`, and `votes`
as objects whose `raw` is the text. There the position is the turn's number. Its lines do not say
which of two sessions with one id they belong to, so the votes go to the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, Line, read_lines
from opd.replay.recordings.recorded import ImportProblem, Problem


class Votes(NamedTuple):
    """What a judge said about one turn, and the line that contains it."""

    line: int
    session_id: str
    position: int
    texts: tuple[str, ...]


def is_votes(value: dict[str, Any]) -> bool:
    """Whether a line contains the votes of a turn (and is not a recording)."""
    is_judge_record = "turn" in value and not {"messages", "response_text"} & value.keys()
    return "session_id" in value and (
        ("message_index" in value and "votes" in value) or is_judge_record
    )


def read_votes(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Votes | Problem]:
    """The votes of `path` in order; a Problem for each line without any.

    The first line of a turn counts; a second is a Problem. Only each turn's place is kept in
    memory.
    """
    seen: set[tuple[str, int]] = set()
    for line in read_lines(path, max_line_bytes):
        if isinstance(line, Problem):
            yield line
            continue
        votes = _votes(path, line)
        if isinstance(votes, Votes):
            turn = (votes.session_id, votes.position)
            if turn in seen:
                votes = _problem(path, line, "an earlier line has the votes of this turn")
            seen.add(turn)
        yield votes


def _votes(path: Path, line: Line) -> Votes | Problem:
    value = line.value
    session_id = value.get("session_id")
    position = value.get("message_index", value.get("turn"))
    if isinstance(session_id, bool) or not isinstance(session_id, (str, int)) or session_id == "":
        return _problem(path, line, "the line has no 'session_id'")
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        return _problem(path, line, f"'message_index' must be a number from 0, not {position!r}")
    texts = value.get("votes")
    if not isinstance(texts, list) or not texts:
        return _problem(path, line, "'votes' must be a list of at least one text")
    raw = [text.get("raw") if isinstance(text, dict) else text for text in texts]
    kept = tuple(text for text in raw if isinstance(text, str))
    if len(kept) < len(raw):
        return _problem(path, line, "'votes' contains something that is not a judge's text")
    return Votes(line.number, str(session_id), position, kept)


def _problem(path: Path, line: Line, detail: str) -> Problem:
    value = line.value
    session_id = value.get("session_id")
    position = value.get("message_index", value.get("turn"))
    return Problem(
        source=str(path),
        line=line.number,
        session_id=session_id if isinstance(session_id, str) else None,
        position=position if isinstance(position, int) else None,
        reason=ImportProblem.BAD_SHAPE,
        detail=detail,
    )
