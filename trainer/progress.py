"""A progress bar with the time left, for work that takes a while."""

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


class ProgressBar:
    """One bar as a context manager: `unit` is what is counted, `note` what stands behind it."""

    def __init__(self, console: Console, description: str, unit: str, total: int | None = None):
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # A log file gets the last state only.
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(description, total=total, note="")

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

    def advance(self) -> None:
        """One more is there."""
        self._progress.advance(self._task)

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """`done` of `total` are there; None leaves the total as it was."""
        if total is not None:
            self._progress.update(self._task, total=total)
        self._progress.update(self._task, completed=done, note=note)
