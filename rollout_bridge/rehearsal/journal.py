"""RUN/rehearsal.jsonl: a line for each version that was measured. It shows whether a run learns.

The rehearsal worker writes it and reads it again when it starts; terminal and report read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from records.hints.types import HintStatus
from rollout_bridge.rehearsal.estimates import Gap, Obedience, PooledObedience, Rate, Uptake
from rollout_bridge.rehearsal.last_line import last_line

FILE = "rehearsal.jsonl"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GapRow(_Row):
    """Nats per token with a 95% interval, from `num_samples` answers."""

    value: float
    low: float
    high: float
    num_samples: int

    @classmethod
    def of(cls, gap: Gap | None) -> GapRow | None:
        """As it is written."""
        if gap is None:
            return None
        return cls(value=gap.value, low=gap.low, high=gap.high, num_samples=gap.num_samples)


class ObedienceRow(_Row):
    """Open wishes at one version: of as many answers, the start model would follow in `before`."""

    followed: int
    asked: int
    abstained: int
    before: float

    @classmethod
    def of(cls, found: Obedience) -> ObedienceRow:
        """As it is written."""
        return cls(
            followed=found.followed,
            asked=found.asked,
            abstained=found.abstained,
            before=found.before,
        )

    def obedience(self) -> Obedience:
        """As it was measured."""
        return Obedience(
            followed=self.followed,
            asked=self.asked,
            abstained=self.abstained,
            before=self.before,
        )


class PooledRow(_Row):
    """Obedience over the last versions, with its interval; `before` is the start's rate."""

    value: float
    low: float
    high: float
    count: int
    before: float
    floor: float
    passed: bool

    @classmethod
    def of(cls, found: PooledObedience | None) -> PooledRow | None:
        """As it is written."""
        if found is None:
            return None
        low, high = found.rate.interval
        return cls(
            value=found.rate.value,
            low=low,
            high=high,
            count=found.rate.count,
            before=found.before,
            floor=found.floor,
            passed=found.passed,
        )


class RateRow(_Row):
    """`hits` of `count` answers."""

    hits: int
    count: int

    @classmethod
    def of(cls, rate: Rate | None) -> RateRow | None:
        """As it is written; None without answers."""
        return None if rate is None or not rate.count else cls(hits=rate.hits, count=rate.count)

    def rate(self) -> Rate:
        """As it was measured."""
        return Rate(hits=self.hits, count=self.count)


class MeasuredHint(_Row):
    """One hint at one version. `held_back`: measured at states that never train. `active_from`: its
    number of steps when it last became active. `rested_at`: a resting hint's gap when it came to
    rest; None if that is not known. `done`: answers at these states that do what the hint asks,
    unasked; `done_start` and `done_hinted`: those of the start model, without and with the hint;
    None if they were not measured.
    """

    hint_id: str
    status: HintStatus
    gap: GapRow | None
    first_gap: float | None
    held_back: bool
    num_steps: int
    active_from: int
    rested_at: float | None = None
    done: RateRow | None = None
    done_start: RateRow | None = None
    done_hinted: RateRow | None = None


class VersionRow(_Row):
    """One version. `turns` and `objections` (accepted hints) are those of the run so far;
    `obedience_of` is obedience to open wishes, by the id of the hint that they are against; `keep`
    is the gap to the start model at states of other kinds; `returned` are ended hints at whose
    states the policy answers like the start again, since this version; `deep_falls` counts the last
    versions that lost many open wishes (`recovery.py`); `failure` says why training does not go on
    from here. With `rehearsal.without_counter`: `unguarded_of` is obedience measured with texts
    that also train, for hints without one that only measures; `unmeasured` are hints without any
    text; `is_start`: the weights are those of the start.
    """

    time: float
    version: int
    turns: int
    objections: int
    hints: tuple[MeasuredHint, ...]
    obedience: ObedienceRow | None
    obedience_of: dict[str, ObedienceRow] = {}
    pooled: PooledRow | None
    keep: GapRow | None
    lessons: dict[str, int]
    returned: tuple[str, ...] = ()
    going_back: tuple[str, ...] = ()
    unguarded_of: dict[str, ObedienceRow] = {}
    unmeasured: tuple[str, ...] = ()
    deep_falls: int = 0
    is_start: bool = False
    failure: str | None = None

    @property
    def has_start_weights(self) -> bool:
        """Whether nothing was trained yet; rows of earlier releases have no `is_start`."""
        return self.is_start or self.version == 0


def uptake_of(measured: Sequence[MeasuredHint]) -> Uptake | None:
    """A hint's uptake by all these measurements of it together; None if it was not measured."""
    done = [one.done for one in measured if one.done is not None]
    if not done or measured[-1].done_start is None or measured[-1].done_hinted is None:
        return None
    return Uptake(
        now=Rate(hits=sum(one.hits for one in done), count=sum(one.count for one in done)),
        start=measured[-1].done_start.rate(),
        hinted=measured[-1].done_hinted.rate(),
    )


def measured_of(hint_id: str, rows: Sequence[VersionRow]) -> list[MeasuredHint]:
    """What these rows say of one hint."""
    return [one for row in rows for one in row.hints if one.hint_id == hint_id]


class Journal:
    """Appends to the file, and knows its rows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.rows = read_rows(folder)
        _cut_unfinished_line(self._path)

    def add(self, row: VersionRow) -> None:
        """Write a row; it is in the file when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")
        self.rows.append(row)


def read_rows(folder: Path) -> list[VersionRow]:
    """All rows, oldest first; an unfinished last line of a killed process is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [VersionRow.model_validate_json(line) for line in lines if line.endswith("\n")]


def last_row(folder: Path) -> VersionRow | None:
    """The newest row, without reading those before it."""
    line = last_line(folder / FILE)
    return None if line is None else VersionRow.model_validate_json(line)


class LastRow:
    """The newest row of a file that grows, read again only when it has grown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = -1
        self._row: VersionRow | None = None

    def read(self) -> VersionRow | None:
        """As `last_row`."""
        path = self._folder / FILE
        size = path.stat().st_size if path.exists() else 0
        if size != self._size:
            self._size, self._row = size, last_row(self._folder)
        return self._row


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
