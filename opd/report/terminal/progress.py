"""Progress bars with the time left, for work that takes a while.

Without a terminal (a file, a pipe), each bar is a line per minute, and a last one at the end.
"""

from __future__ import annotations

import textwrap
import time
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from opd.report.terminal.at_work import LINE_EVERY_S, every

_WIDTH = 80
_BEGAN_AT, _NOTE, _UNIT = "began_at", "note", "unit"


class Bar:
    """One of the bars that are shown: `unit` is what is counted, `note` the text after it."""

    def __init__(
        self, progress: Progress, description: str, unit: str, total: int | None, starts: bool
    ):
        self._progress = progress
        fields: dict[str, Any] = {_UNIT: unit, _NOTE: "", _BEGAN_AT: 0 if starts else None}
        self._task = progress.add_task(description, start=starts, total=total, **fields)

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)

    def update(self, done: int, total: int | None = None, note: str | None = None) -> None:
        """`done` of `total` are done; None leaves the total, or the note, as it was."""
        self._progress.start_task(self._task)
        fields: dict[str, Any] = {} if note is None else {_NOTE: note}
        if self._progress.tasks[self._task].fields[_BEGAN_AT] is None:
            # What was done before says nothing about the time that the rest takes.
            fields[_BEGAN_AT] = done
        self._progress.update(self._task, completed=done, total=total, **fields)


class ProgressBars:
    """Bars below each other, shown while it is entered."""

    def __init__(self, console: Console, line_every_s: float = LINE_EVERY_S):
        self._console = console
        self._line_every_s = line_every_s
        self._lines = ExitStack()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            _LeftColumn(),
            # If there is too little room, the note takes more lines and the figures stay whole.
            TextColumn("{task.fields[note]}", table_column=Column()),
            console=console,
            refresh_per_second=4,
        )

    def add(
        self, description: str, unit: str, total: int | None = None, *, starts: bool = True
    ) -> Bar:
        """Another bar; its time runs from now or, unless it `starts`, from its first update."""
        return Bar(self._progress, description, unit, total, starts)

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        else:
            self._lines.enter_context(every(self._line_every_s, self._say_all))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()
        else:
            self._lines.close()
            self._say_all(is_last=True)

    def _say_all(self, *, is_last: bool = False) -> None:
        for task in self._progress.tasks:
            if task.started and (is_last or not task.finished):
                for line in task_lines(task):
                    self.say(line)


class ProgressBar(ProgressBars):
    """A single bar."""

    def __init__(self, console: Console, description: str, unit: str, total: int | None = None):
        super().__init__(console)
        bar = self.add(description, unit, total)
        self.advance = bar.advance
        self.update = bar.update


class _LeftColumn(ProgressColumn):
    """The time left, at the mean rate since the bar began; an estimate from only the last seconds
    has none if one item takes longer than that.
    """

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(_clock(seconds_left(task)), style="progress.remaining")


def seconds_left(task: Task) -> float | None:
    """The time left at the mean rate so far; None before the first item is done, or without a
    total.
    """
    done = task.completed - (task.fields[_BEGAN_AT] or 0)
    if task.finished:
        return 0.0
    if task.total is None or task.elapsed is None or done <= 0:
        return None
    return task.elapsed * (task.total - task.completed) / done


def task_lines(task: Task) -> list[str]:
    """A bar as text, for a page of 80 columns."""
    total = "" if task.total is None else f" of {task.total:.0f}"
    said = [
        f"{time.strftime('%H:%M:%S')} {task.description}: {task.completed:.0f}{total} "
        f"{task.fields[_UNIT]}, {_clock(task.elapsed)} so far"
    ]
    if not task.finished:
        said.append(f"{_clock(seconds_left(task))} left")
    said += [task.fields[_NOTE]] if task.fields[_NOTE] else []
    return textwrap.wrap(", ".join(said), _WIDTH, subsequent_indent="  ")


def _clock(seconds: float | None) -> str:
    return "?" if seconds is None else str(timedelta(seconds=int(seconds)))
