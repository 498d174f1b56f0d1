"""`opd replay compare`: the command, for the group that registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opd.cli.guarded import guarded


def compare_runs(
    a: Annotated[Path, typer.Argument(help="A run folder.")],
    b: Annotated[Path, typer.Argument(help="Another one that replayed the same recording.")],
    out: Annotated[Path, typer.Option(help="The page to draw, HTML.")] = Path("compare.html"),
) -> None:
    """What two settings made of the same turns: votes, hints, leaks, advantages, tokens."""

    def work() -> None:
        from opd.replay.comparison.compare import compare
        from opd.replay.comparison.words import lines

        for line in lines(compare(a, b, out)):
            typer.echo(line)

    guarded(work)
