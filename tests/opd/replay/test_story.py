"""The report of a replay: what happened in sentences, and the gap before and after."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.evaluation.gap import CaseGap
from opd.replay.modes import ReplayMode
from opd.replay.story import gap_rows, replay_story
from opd.replay.summary import build_summary, save
from opd.replay.taking_in import ImportReport
from records.names import TurnState
from records.reading.replay_status import RecordedHint, ReplayStatus
from records.store import Store
from tests.opd.report.test_run_report import Letters
from tests.records.new_store import new_store

STATUS = ReplayStatus(
    num_sessions=3,
    num_recorded=20,
    num_resampled=0,
    states=dict.fromkeys(TurnState, 0),
    drops={},
    num_votes=60,
    num_votes_recorded=0,
    num_judged=18,
    num_accepted=6,
    num_scored=6,
    num_held_out=2,
    scored_tokens=900,
    num_trained=4,
    kinds={},
)
HINT = RecordedHint(session_name="airline-1", position=4, hint="Name the fee <first>.")


def gaps(*levels: float) -> list[CaseGap]:
    return [
        CaseGap(session=str(at), reverse=level * 10, forward=level * 10, num_tokens=10)
        for at, level in enumerate(levels)
    ]


def summary(
    mode: ReplayMode = "rescore", *, updates: int = 2, status: ReplayStatus = STATUS, **found: Any
) -> dict[str, Any]:
    imported = ImportReport(
        num_sessions=3, num_turns=21, num_rendered=20, formats=Counter({"openai-chat": 3})
    )
    return build_summary(
        mode=mode,
        model="/somewhere/models/small",
        imported=imported,
        status=status,
        num_updates=updates,
        gaps=found,
        timings={},
    )


def test_the_story_says_what_was_read_found_trained_and_gained() -> None:
    held_out = {"before": gaps(0.5, 0.9, 0.1), "after": gaps(0.4, 0.7, 0.02)}
    told = replay_story(summary(held_out=held_out), [HINT])
    assert told[0].startswith("3 recorded sessions with 21 answers were read")
    assert "20 of the answers could be written as tokens of models/small." in told[0]
    assert told[1].startswith("The judge read what followed 18 answers. After 6 of them it found")
    assert told[2].endswith("session airline-1: “Name the fee <first>.”")
    assert told[3].startswith("2 updates trained 4 of them. 2 were held out")
    assert "It was 0.500 [" in told[4]
    assert ": better (change -0.1267 [-0.2000, -0.0800])." in told[4]
    only = replay_story(summary("judge-only", updates=0), [])
    assert only[-1] == "Nothing was trained: this replay only judges."
    again = replay_story(summary(status=replace(STATUS, num_resampled=1)), [])
    assert "The policy answered 1 recorded request again" in again[1]


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((0.6, 1.2, 0.2), "worse (change "),
        ((0.6, 0.7, 0.1), "no clear difference (change "),
    ],
)
def test_each_gap_has_a_verdict(after: tuple[float, ...], verdict: str) -> None:
    [row] = gap_rows(summary(trained={"before": gaps(0.5, 0.9, 0.1), "after": gaps(*after)}))
    assert row[0] == "gap to the hinted teacher, turns that were trained on"
    assert row[3].startswith(verdict)


def test_what_was_measured_once_or_in_one_session_has_no_verdict() -> None:
    assert gap_rows(summary(held_out={"before": gaps(0.5)})) == []
    [row] = gap_rows(summary(held_out={"before": gaps(0.5), "after": gaps(0.1)}))
    assert row[1:] == ("0.500", "0.100", "not known: too few sessions for an interval")


async def test_the_report_begins_with_the_story_and_the_table(tmp_path: Path) -> None:
    made = summary(held_out={"before": gaps(0.5, 0.9, 0.1), "after": gaps(0.4, 0.7, 0.02)})
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        path = await save(tmp_path, made, store, Letters())  # type: ignore[arg-type]
    page = path.read_text(encoding="utf-8")
    order = [
        page.index(one)
        for one in ("recorded sessions with", "Before and after", "Gap between hinted teacher")
    ]
    assert order == sorted(order)
    assert "<title>Replay (rescore) with models/small</title>" in page
