"""Whatever a file holds, reading it gives problems and sessions that can be stored, no error."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.replay.recordings.reading import detect_format, read_recordings
from opd.replay.recordings.recorded import Problem, RecordedSession
from opd.replay.recordings.votes import Votes, read_votes
from records.messages import path_ids
from tests.opd.replay.recording_files import AIRLINE, AIRLINE_VOTES, write_lines
from tests.opd.replay.recordings.formats import test_openclaw, test_openclaw_rl
from tests.opd.replay.recordings.formats.claude_code import test_sessions as test_claude_code
from tests.opd.replay.recordings.formats.export import test_sessions as test_export

FILES: dict[str, list[Any]] = {
    "openai-chat": [
        {**json.loads(line), "tools": [test_export.TOOL]}
        for line in AIRLINE.read_text().splitlines()[2:]
    ],
    "export": [test_export.line(test_export.FIRST, test_export.SECOND)],
    "openclaw-rl": [test_openclaw_rl.FIRST, test_openclaw_rl.SECOND],
    "openclaw": [test_openclaw.HEADER, *test_openclaw.TALK],
    "claude-code": [*test_claude_code.TALK, *test_claude_code.COMPACTED],
}
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


def spoiled(draw: Callable[[Any], Any], lines: list[Any]) -> list[Any]:
    """The lines with a value somewhere in them replaced, or a key or element taken away."""
    lines = copy.deepcopy(lines)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = lines
        keys = list(range(len(lines)))
        for _ in range(draw(st.integers(0, 6))):
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner:
                break
            place = inner
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = draw(st.sampled_from(keys))
        if draw(st.booleans()) and place is not lines:
            del place[key]
        else:
            place[key] = draw(NONSENSE)
    return lines


def check(session: RecordedSession) -> None:
    positions: set[int] = set()
    assert session.turns
    for turn in session.turns:
        assert turn.position not in positions
        assert turn.parent is None or turn.parent in positions
        positions.add(turn.position)
        assert turn.response["role"] == "assistant" or turn.problem is not None
        path_ids("root", [*turn.messages, turn.response, *turn.next_state])
        json.dumps([turn.messages, turn.response, turn.next_state, turn.tools], allow_nan=False)


@pytest.mark.parametrize("name", list(FILES))
@given(st.data())
def test_spoiled_file_is_read_to_its_end(name: str, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = write_lines(Path(folder, "log.jsonl"), spoiled(data.draw, FILES[name]))
        for found in read_recordings([path]):
            if isinstance(found, RecordedSession):
                check(found)
            else:
                assert str(found).count("\n") == 0


@pytest.mark.parametrize("name", list(FILES))
def test_whole_file_is_read_whole(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.jsonl", FILES[name])
    assert detect_format(path) == name
    sessions = [found for found in read_recordings([path]) if isinstance(found, RecordedSession)]
    assert sessions
    for session in sessions:
        check(session)
        assert session.format == name
        assert all(turn.problem is None for turn in session.turns)


@given(st.data())
def test_spoiled_votes_are_read_to_their_end(data: st.DataObject) -> None:
    lines = [json.loads(line) for line in AIRLINE_VOTES.read_text().splitlines()[:4]]
    with TemporaryDirectory() as folder:
        path = write_lines(Path(folder, "votes.jsonl"), spoiled(data.draw, lines))
        for found in read_votes(path):
            assert isinstance(found, (Problem, Votes))
            if isinstance(found, Votes):
                assert all(isinstance(text, str) for text in found.texts)
