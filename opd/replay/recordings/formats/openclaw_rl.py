"""Records of OpenClaw-RL's API servers: one JSON object per line, one line per turn.

Source: https://github.com/Gen-Verse/OpenClaw-RL, `openclaw-opd/openclaw_opd_api_server.py` and
`openclaw-rl/openclaw_api_server.py` (`_buffer_record`, `_flush_pending_record`), which write to
OPENCLAW_RECORD_FILE: `session_id`, `turn` (from 1), `timestamp`, `messages` (the request's),
`prompt_text`, `response_text` (the response as the chat template writes it), `tool_calls` (OpenAI's
list, or null) and `next_state` (the last message of the next request, or null). The combined server
inherits this. `openclaw-tinker/api_server.py` leaves `messages` out: such a line is reported.

- Lines of several sessions are mixed, because a turn is written when its session goes on. A first
  pass keeps only each line's place and turn; a second reads one session at a time.
- A session that is done counts its turns from 1 again under the same id. That is another session
  here, with a number after its id.
- The next state is what the next record's request has after its last assistant message, if that
  ends with the recorded message: several tool results are then together. Otherwise it is only the
  recorded message.
- A position is the turn's number. Tools are not in the record.
- Ids and log-probs are not in it either. Votes are in a separate file (replay/votes.py).
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from opd.replay.recordings.entries import Origin
from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, Line, read_line_at, read_lines
from opd.replay.recordings.formats.openai_chat import is_number
from opd.replay.recordings.formats.openclaw_rl_session import SessionReading
from opd.replay.recordings.formats.opened import opened
from opd.replay.recordings.recorded import ImportProblem, Problem, Recording, RecordingFormat


def is_openclaw_rl(value: dict[str, Any]) -> bool:
    """Whether a line is of this format."""
    return "session_id" in value and "turn" in value and "response_text" in value


def read_openclaw_rl(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Recording:
    """The problems of the lines of `path`, then its sessions in the order of their first lines."""
    runs: list[_Run] = []
    newest: dict[str, _Run] = {}
    for line in read_lines(path, max_line_bytes):
        problem = line if isinstance(line, Problem) else _line_problem(path, line)
        if problem is not None:
            yield problem
        elif isinstance(line, Line):
            session_id, turn = str(line.value["session_id"]), line.value["turn"]
            run = newest.get(session_id)
            if run is None or turn <= run.turn:
                run = _Run(session_id, 1 if run is None else run.number + 1)
                newest[session_id] = run
                runs.append(run)
            run.add(line.number, line.offset, turn)
    if not runs:
        return
    with opened(path, seekable=True) as file:
        for run in runs:
            yield from SessionReading(run.origin(path), run.lines).session(
                read_line_at(file, offset) for offset in run.offsets
            )


class _Run:
    """Where the lines of a session are, until it counts its turns from the start again."""

    __slots__ = ("lines", "number", "offsets", "session_id", "turn")

    def __init__(self, session_id: str, number: int) -> None:
        self.session_id = session_id
        self.number = number
        self.turn = 0
        self.lines = array("q")
        self.offsets = array("q")

    def add(self, line: int, offset: int, turn: int) -> None:
        self.lines.append(line)
        self.offsets.append(offset)
        self.turn = turn

    def origin(self, path: Path) -> Origin:
        return Origin(
            session_id=self.session_id if self.number == 1 else f"{self.session_id}#{self.number}",
            format=RecordingFormat.OPENCLAW_RL,
            source=str(path),
            line=self.lines[0],
        )


def _line_problem(path: Path, line: Line) -> Problem | None:
    """Why a line is not a record of a turn."""
    value = line.value
    turn = value.get("turn")
    session_id = value.get("session_id")
    if not isinstance(session_id, str) and not is_number(session_id):
        detail = "the record has no 'session_id'"
    elif not isinstance(turn, int) or isinstance(turn, bool) or turn < 1:
        detail = f"'turn' must be a number from 1, not {turn!r}"
    elif not isinstance(value.get("messages"), list):
        detail = "the record has no list 'messages' (openclaw-tinker writes only their text)"
    elif not isinstance(value.get("response_text"), str):
        detail = "the record has no text 'response_text'"
    else:
        return None
    return Problem(
        source=str(path),
        line=line.number,
        session_id=None if session_id is None else str(session_id),
        reason=ImportProblem.BAD_SHAPE,
        detail=detail,
    )
