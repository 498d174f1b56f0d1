"""Progress bars with the time left, for work that takes a while."""

from __future__ import annotations

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
from rich.table import Column


class Bar:
    """One bar of those that are shown: `unit` is what is counted, `note` what stands behind it."""

    def __init__(
        self, progress: Progress, description: str, unit: str, total: int | None, starts: bool
    ):
        self._progress = progress
        self._task = progress.add_task(description, start=starts, total=total, unit=unit, note="")

    def advance(self) -> None:
        """One more is there."""
        self._progress.advance(self._task)

    def update(self, done: int, total: int | None = None, note: str | None = None) -> None:
        """`done` of `total` are there; None leaves the total, or the note, as it was."""
        self._progress.start_task(self._task)
        self._progress.update(self._task, completed=done, total=total)
        if note is not None:
            self._progress.update(self._task, note=note)


class ProgressBars:
    """Bars below each other, shown while it is entered."""

    def __init__(self, console: Console):
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            # Where there is too little room, the note takes more lines and the figures stay whole.
            TextColumn("{task.fields[note]}", table_column=Column()),
            console=console,
            # A log file gets the last state only.
            refresh_per_second=4,
        )

    def add(
        self, description: str, unit: str, total: int | None = None, *, starts: bool = True
    ) -> Bar:
        """Another bar; its time runs from now or, unless it `starts`, from its first update."""
        return Bar(self._progress, description, unit, total, starts)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class ProgressBar(ProgressBars):
    """One bar alone."""

    def __init__(self, console: Console, description: str, unit: str, total: int | None = None):
        super().__init__(console)
        bar = self.add(description, unit, total)
        self.advance = bar.advance
        self.update = bar.update
