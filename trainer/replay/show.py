"""What a replay shows in the terminal while it works."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from records.replay_status import ReplayStatus
from records.types import TurnState
from trainer.replay.taking_in import ImportReport

_IN_WORK = (TurnState.JUDGING, TurnState.SCORING)


class ReplayProgress:
    """Three bars: sessions taken in, turns judged and scored, samples trained on."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
        )
        self._import = self._bars.add_task("import", total=None, note="")
        self._score = self._bars.add_task("judge", total=None, note="", start=False)
        self._train = self._bars.add_task("train", total=None, note="", start=False)
        self._scored_before = -1
        self._since = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def imported(self, report: ImportReport) -> None:
        """Sessions so far; how many there are is not known before the last file is read."""
        note = f"{report.num_rendered} of {report.num_turns} turns, {report.num_tokens} tokens"
        if report.num_votes:
            note += f", votes on {report.num_votes} turns"
        self._bars.update(self._import, completed=report.num_sessions, note=note)

    def import_ended(self, report: ImportReport) -> None:
        """The number of sessions is known now."""
        self._bars.update(self._import, total=report.num_sessions, completed=report.num_sessions)

    def working(self, status: ReplayStatus) -> None:
        """Where the recorded turns stand."""
        if self._scored_before < 0:
            self._scored_before, self._since = status.scored_tokens, time.monotonic()
            self._bars.start_task(self._score)
        rate = (status.scored_tokens - self._scored_before) / max(
            time.monotonic() - self._since, 1.0
        )
        left = sum(status.states[state] for state in _IN_WORK)
        total = status.num_recorded + status.num_resampled
        note = (
            f"{status.num_votes} votes, {status.num_accepted} accepted, "
            f"{status.num_scored} scored, {rate:.0f} tokens/s"
        )
        self._bars.update(self._score, total=total, completed=total - left, note=note)

    def training(self, status: ReplayStatus, version: int) -> None:
        """Samples trained on, of those that can be."""
        self._bars.start_task(self._train)
        waiting = status.states[TurnState.READY] + status.states[TurnState.LEASED]
        self._bars.update(
            self._train,
            total=status.num_trained + waiting,
            completed=status.num_trained,
            note=f"{version} updates",
        )
