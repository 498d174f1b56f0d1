"""RUN/guard.jsonl: a line for each version that was checked, the start (version 0) first.

The guard writes it. The trainer takes no step from a version that has no line yet, and status and
pages show the newest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rollout_bridge.rehearsal.journal import GapRow
from rollout_bridge.rehearsal.last_line import last_line

FILE = "guard.jsonl"


class Figures(BaseModel):
    """How answers look, whatever they say. `kl` is the mean of log pi - log pi_start per token of
    the answers, `surprise` that of -log pi (an estimate of the entropy), both in nats. `tokens` is
    the mean length of an answer, `repeated` the share of its four-token sequences that repeat an
    earlier one. None: no answer could be measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kl: float | None
    tokens: float | None
    surprise: float | None
    repeated: float | None


class Checked(Figures):
    """A version's results on the canaries. `passed` of `asked` answers did what their canary wants;
    on `undecided` ones the judge or the user's function did not decide. `surprise_most` is the
    upper bound of the 95% interval of `surprise`; None: there is none, as with one canary.
    `recorded` are its answers to recorded requests, `recorded_start` the start model's to the same
    ones; None: there were none. `kl_last` is the mean of log pi_good - log pi per token of the
    answers of version `last_good`, the one that passed last; None: that one's answers are not
    known. `gap` is the mean of log pi - log q per token of answers to trained turns, where q is the
    start model under the turn's hint, and `gap_start` that of the start model's answers; None: no
    turn was trained under a hint, or none can be answered. All in nats. `breaches` names the limits
    that were broken.
    """

    version: int
    time: float
    passed: int
    asked: int
    undecided: int = 0
    surprise_most: float | None = None
    recorded: Figures | None = None
    recorded_start: Figures | None = None
    kl_last: float | None = None
    last_good: int | None = None
    gap: GapRow | None = None
    gap_start: GapRow | None = None
    failed: dict[str, int] = {}
    """Answers that failed, by canary; canaries without any have no entry."""
    breaches: list[str] = []
    took_s: float = 0.0
    staged: bool = False
    """Whether it was checked before any agent was answered by it."""


def read_checks(folder: Path) -> list[Checked]:
    """All lines, oldest first; an unfinished last line of a killed process is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Checked.model_validate_json(line) for line in lines if line.endswith("\n")]


def never_served(checks: Sequence[Checked]) -> set[int]:
    """The versions that failed before any agent was answered by them; a later check of the same
    version counts instead.
    """
    newest = {row.version: row for row in checks}
    return {version for version, row in newest.items() if row.staged and row.breaches}


class Verdicts:
    """Which versions have passed; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._end = 0
        self._passed: dict[int, bool] = {}

    def passed(self, version: int) -> bool:
        """Whether the last check of `version` found no breach; False if there was none."""
        if self._path.exists() and self._path.stat().st_size > self._end:
            with self._path.open("rb") as file:
                file.seek(self._end)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            for line in whole.splitlines():
                row = Checked.model_validate_json(line)
                self._passed[row.version] = not row.breaches
            self._end += len(whole)
        return self._passed.get(version, False)


def last_check(folder: Path) -> Checked | None:
    """The newest line, without reading those before it."""
    line = last_line(folder / FILE)
    return None if line is None else Checked.model_validate_json(line)


def add_check(folder: Path, row: Checked) -> None:
    """Write a line; it is in the file when this returns. An unfinished line of a killed process is
    ended first, so that the new one stands alone.
    """
    path = folder / FILE
    with path.open("ab+") as file:
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                content = path.read_bytes()
                file.truncate(content.rfind(b"\n") + 1)
        file.write(row.model_dump_json().encode() + b"\n")
