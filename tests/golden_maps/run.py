"""Runs golden files through their maps and counts how the comparisons ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden_maps import find_map
from tests.golden_maps.check import Comparison, GoldenMap, Outcome
from tests.golden_maps.garbage import declare
from tests.trainer.golden import decode

MAX_DIFFERENT_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """All comparisons of one case, at least one."""

    name: str
    comparisons: tuple[Comparison, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst of its comparisons."""
        outcomes = {comparison.outcome() for comparison in self.comparisons}
        for worst in (Outcome.FAILED, Outcome.DIFFERENT):
            if worst in outcomes:
                return worst
        return Outcome.AGREED


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """One file's results; `problem` names what is wrong with the file as a whole."""

    path: Path
    cases: tuple[CaseResult, ...]

    def count(self, outcome: Outcome) -> int:
        """Comparisons that ended so."""
        return sum(
            comparison.outcome() is outcome
            for case in self.cases
            for comparison in case.comparisons
        )

    @property
    def problem(self) -> str | None:
        """None if every comparison agrees, but for few deliberate differences."""
        total = sum(len(case.comparisons) for case in self.cases)
        if self.count(Outcome.FAILED):
            return "comparisons failed"
        if self.count(Outcome.DIFFERENT) > MAX_DIFFERENT_SHARE * total:
            return f"more than {MAX_DIFFERENT_SHARE:.0%} of its comparisons differ"
        return None


def run_file(path: Path) -> FileResult:
    """Evaluate one golden file. Raises ValueError for a file without map, cases or comparisons."""
    content = json.loads(path.read_text())
    meta = content["meta"]
    evaluate = find_map(path, meta)
    results = []
    for name, case in _named_cases(content["cases"]):
        comparisons = _evaluate(evaluate, case, meta)
        if not comparisons:
            raise ValueError(f"{path.name}: case {name} was compared with nothing")
        results.append(CaseResult(name=name, comparisons=comparisons))
    if not results:
        raise ValueError(f"{path.name}: no cases")
    return FileResult(path=path, cases=tuple(results))


def _evaluate(evaluate: GoldenMap, case: Any, meta: Any) -> tuple[Comparison, ...]:
    """A case that our functions refuse or break on is a failed comparison, not the end."""
    try:
        decoded = decode(case)
        return declare(tuple(evaluate(decoded, meta)), decoded, evaluate, meta)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return (Comparison(name="evaluation", ours=text, reference="no error"),)


def _named_cases(cases: Any) -> Iterator[tuple[str, Any]]:
    """A list of cases one by one; a table of several kinds of values as one case."""
    if isinstance(cases, dict):
        yield "all", cases
        return
    for index, case in enumerate(cases):
        yield str(case.get("name", index)), case
