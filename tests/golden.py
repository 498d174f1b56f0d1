"""`python tests/golden.py FILE...` compares this project's functions with golden files.

Prints, per file, the cases that agree and those that do not, with the reason of each deliberate
difference. Exits 1 on any comparison that failed, or where more than 15% of a file's are deliberate
differences; 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.golden_maps.check import Outcome
from tests.golden_maps.run import FileResult, run_file

MARKS = {Outcome.AGREED: "agrees  ", Outcome.DIFFERENT: "differs ", Outcome.FAILED: "DISAGREES"}


def show(result: FileResult) -> None:
    """The cases of one file, then its counts of comparisons."""
    print(f"\n{result.path.name}")
    for case in result.cases:
        print(f"  {MARKS[case.outcome]} {case.name} ({len(case.comparisons)} comparisons)")
        for comparison in case.comparisons:
            if comparison.outcome() is not Outcome.AGREED:
                print(f"      {comparison.outcome()}: {comparison.explain()}")
    counts = ", ".join(f"{result.count(outcome)} {outcome}" for outcome in Outcome)
    print(f"  {len(result.cases)} cases, {counts}{f': {result.problem}' if result.problem else ''}")


def main(words: Sequence[str] | None = None) -> int:
    """Evaluate the files of the command line, or of `words`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    results: list[FileResult] = []
    unreadable = 0
    for path in parser.parse_args(words).files:
        try:
            results.append(run_file(path))
        except (OSError, ValueError, KeyError) as error:
            print(f"\n{path}: {type(error).__name__}: {error}", file=sys.stderr)
            unreadable += 1
            continue
        show(results[-1])
    totals = ", ".join(
        f"{sum(result.count(outcome) for result in results)} {outcome}" for outcome in Outcome
    )
    bad = [result.path.name for result in results if result.problem]
    print(f"\n{len(results)} files: {totals}")
    if bad:
        print(f"not in agreement: {', '.join(bad)}")
    if unreadable:
        return 2
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
