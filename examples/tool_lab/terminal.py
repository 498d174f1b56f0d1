"""What the lab shows in the terminal while it works: bars with time left, counts that move."""

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

from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.learning import LearningState
from records.types import TurnState


class _Shown:
    """A progress bar as a context manager."""

    def __init__(self, console: Console, description: str, total: int | None, unit: str):
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


class MeasuringProgress(_Shown):
    """Answers sampled out of all."""

    def __init__(self, console: Console, description: str):
        super().__init__(console, description, None, "answers")

    def update(self, done: int, total: int) -> None:
        """`done` of `total` answers are there."""
        self._progress.update(self._task, completed=done, total=total)


class LearningProgress(_Shown):
    """Update attempts out of all, with the turns behind them."""

    def __init__(self, console: Console, lab: LabConfig):
        super().__init__(console, "learning", lab.updates, "updates")

    def update(self, state: LearningState) -> None:
        """Show the state of the store."""
        trained = state.turns.get(TurnState.TRAINED, 0)
        # Short enough for a terminal of 80 columns.
        note = f"{state.num_turns} turns, {trained} trained"
        self._progress.update(self._task, completed=state.attempts, note=note)
