"""What a replay shows in the terminal while it works."""

from __future__ import annotations

import time

from rich.console import Console

from opd.replay.modes import ReplayMode
from opd.replay.taking_in import ImportReport
from opd.report.terminal.progress import Bar, ProgressBars
from records.names import TurnState
from records.reading.replay_status import ReplayStatus

HINTS_EXPECTED_BY = 30
"""Judged turns after which at least one hint is expected."""


class ReplayProgress(ProgressBars):
    """Bars: sessions imported, turns judged (in most modes also scored) and, if there are any,
    samples trained on and responses compared.
    """

    def __init__(self, console: Console, mode: ReplayMode) -> None:
        super().__init__(console)
        judging, scoring = TurnState.JUDGING, TurnState.SCORING
        self._in_work = (judging,) if mode == "judge-only" else (judging, scoring)
        self._import = self.add("import", "sessions")
        self._score = self.add("judge", "turns", starts=False)
        self._train: Bar | None = None
        self._practise: Bar | None = None
        self._measure: Bar | None = None
        self._scored_before = -1
        self._since = 0.0
        self._is_told = False

    def imported(self, report: ImportReport) -> None:
        """Sessions so far; their total is unknown until the last file is read."""
        note = f"{report.num_rendered} of {report.num_turns} turns, {report.num_tokens} tokens"
        if report.num_votes:
            note += f", votes on {report.num_votes} turns"
        self._import.update(report.num_sessions, note=note)

    def import_ended(self, report: ImportReport) -> None:
        """The number of sessions is known now."""
        self._import.update(report.num_sessions, report.num_sessions)

    def starting(self) -> None:
        """What takes a while before the first turn is judged."""
        self._score.update(0, note="starting the engines")

    def working(self, status: ReplayStatus) -> None:
        """Where the recorded turns stand."""
        if self._scored_before < 0:
            self._scored_before, self._since = status.scored_tokens, time.monotonic()
        rate = (status.scored_tokens - self._scored_before) / max(
            time.monotonic() - self._since, 1.0
        )
        left = sum(status.states[state] for state in self._in_work)
        total = status.num_recorded + status.num_resampled
        note = (
            f"{status.num_votes} votes, {status.num_accepted} accepted, "
            f"{status.num_scored} scored, {rate:.0f} tokens/s"
        )
        self._score.update(total - left, total, note)
        self._say_no_hints(status)

    def _say_no_hints(self, status: ReplayStatus) -> None:
        """Say it once: a judge that finds nothing costs as much time as one that does."""
        if self._is_told or status.num_judged < HINTS_EXPECTED_BY:
            return
        self._is_told = True
        if not status.num_accepted:
            self.say(
                f"no hint in the first {status.num_judged} judged turns: this judge may be too "
                "weak, or the recording shows nothing to learn; Ctrl-C stops, what is judged stays "
                "(another judge: --set judge.base_url=URL --set judge.model=NAME, in a new --run)"
            )

    def training(self, status: ReplayStatus, version: int) -> None:
        """Samples trained on, of those that can train."""
        waiting = status.states[TurnState.READY] + status.states[TurnState.LEASED]
        total = status.num_trained + waiting
        if self._train is None:
            self._train = self.add("train", "samples")
        self._train.update(status.num_trained, total, f"{version} updates")

    def practising(self, num_done: int, num_hints: int) -> None:
        """Hints that are no longer practised, of all."""
        if self._practise is None:
            self._practise = self.add("practise", "hints")
        self._practise.update(num_done, num_hints)

    def measuring(self, num_responses: int) -> None:
        """This many responses will be compared between student and hinted teacher."""
        if not num_responses:
            return
        if self._measure is None:
            self._measure = self.add("measure", "responses")
        self._measure.update(0, num_responses, "gap to the hinted teacher")

    def measured(self) -> None:
        """One more has been compared; may be called in any thread."""
        assert self._measure is not None, "measuring comes before"
        self._measure.advance()
