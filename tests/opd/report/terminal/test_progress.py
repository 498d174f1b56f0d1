"""Progress for who looks at a terminal of 80 columns, and for who reads a log afterwards."""

from __future__ import annotations

import io
import time

from rich.console import Console

from opd.replay.show import ReplayProgress
from opd.report.terminal.at_work import at_work
from opd.report.terminal.progress import ProgressBars, seconds_left
from opd.report.terminal.status import STATUS_WIDTH, shown_status
from records.names import DropReason, TurnState
from records.reading.replay_status import ReplayStatus


def redirected() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80), file


def status(judged: int, accepted: int, left: int) -> ReplayStatus:
    states = dict.fromkeys(TurnState, 0) | {TurnState.JUDGING: left}
    return ReplayStatus(
        num_sessions=4,
        num_recorded=judged + left,
        num_resampled=0,
        states=states,
        drops={},
        num_votes=3 * judged,
        num_votes_recorded=0,
        num_judged=judged,
        num_accepted=accepted,
        num_scored=0,
        num_held_out=0,
        scored_tokens=0,
        num_trained=0,
        kinds={},
    )


def test_a_log_file_gets_a_line_now_and_then_with_the_time_left_and_one_at_the_end() -> None:
    console, file = redirected()
    with ProgressBars(console, line_every_s=0.05) as bars:
        bar = bars.add("judge", "turns", 10)
        bar.update(5, note="15 votes, 2 accepted, 1 scored, 123456 tokens/s of the teacher")
        deadline = time.monotonic() + 10
        while file.getvalue().count("judge: 5 of 10 turns") < 2:
            assert time.monotonic() < deadline, file.getvalue()
            time.sleep(0.01)
        bar.update(10)
    lines = file.getvalue().splitlines()
    assert "0:00:00 left" in lines[0]
    assert any("judge: 10 of 10 turns" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in file.getvalue()


def test_time_left_is_known_however_slow_the_items_are_and_counts_only_this_run() -> None:
    console, file = redirected()
    with ProgressBars(console) as bars:
        bar = bars.add("judge", "turns", starts=False)
        bar.update(90, 100)  # done by an earlier start
        time.sleep(0.2)
        bar.update(91, 100)
        task = bars._progress.tasks[0]
        left = seconds_left(task)
        assert left is not None
        assert 9 * 0.2 <= left < 9 * 5
    assert "-:--" not in file.getvalue()


def test_a_judge_that_finds_no_hint_in_its_first_turns_is_told_once() -> None:
    console, file = redirected()
    with ReplayProgress(console, "judge-only") as shown:
        shown.working(status(29, 0, 71))
        assert "no hint" not in file.getvalue()
        shown.working(status(31, 0, 69))
        shown.working(status(32, 0, 68))
    assert file.getvalue().count("no hint in the first 31 judged turns") == 1


def test_a_judge_that_finds_hints_is_left_alone() -> None:
    console, file = redirected()
    with ReplayProgress(console, "judge-only") as shown:
        shown.working(status(31, 1, 69))
        shown.working(status(62, 1, 38))
    assert "no hint" not in file.getvalue()


def test_silent_work_says_now_and_then_that_it_goes_on(capsys) -> None:
    said = ""
    with at_work("verifying", line_every_s=0.05):
        deadline = time.monotonic() + 10
        while said.count("verifying: at work for 0 s") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            said += capsys.readouterr().err
    time.sleep(0.2)
    assert capsys.readouterr().err.count("verifying") <= 1, "it ends with the work"


def test_the_status_fits_80_columns_and_drops_detail_before_totals() -> None:
    many = dict.fromkeys(TurnState, 1_234_567)
    reasons = dict.fromkeys(DropReason, 99_999)
    for counts in ({}, many, {TurnState.READY: 3}):
        for drops in ({}, reasons, {DropReason.NO_HINT: 7}):
            line = shown_status(123_456, counts, drops)
            assert len(line) <= STATUS_WIDTH, line
            assert len(shown_status(123_456, counts, drops, 0.3)) <= STATUS_WIDTH
            assert line.startswith("version 123456; turns: ")
            assert " trained, " in line
            assert " dropped" in line
    few = {TurnState.TRAINED: 32, TurnState.READY: 3, TurnState.DROPPED: 7}
    assert shown_status(2, few, {DropReason.NO_HINT: 7}) == (
        "version 2; turns: 32 trained, 3 waiting (3 batch), 7 dropped (7 no_hint)"
    )
    behind = shown_status(2, few, {DropReason.OVER_CAPACITY: 7}, judged_share=0.345)
    assert (
        behind == "version 2; turns: 32 trained, 3 waiting, 7 dropped (7 over_capacity); 34% judged"
    )
