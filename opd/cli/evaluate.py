"""`opd eval`: options in, tables or JSON out; `opd.evaluation.command` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.cli.guarded import guarded

if TYPE_CHECKING:
    from opd.evaluation.command import Evaluated


def evaluate(
    run_folder: Annotated[Path, typer.Option("--run", help="The folder of a run.")],
    version: Annotated[
        str, typer.Option(help="Version to measure: a number, latest or start.")
    ] = "latest",
    against: Annotated[
        str | None,
        typer.Option(
            help="Version to compare with, on the same tasks, or several: start,4,8; with "
            "recorded: start."
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="lab, recorded, or your own as package.module:function; if not given: lab for a "
            "run of the tool lab or of its model, else recorded."
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=1, help="Tasks for each metric; with recorded: states.")
    ] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each task.")] = 4,
    max_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Sample tasks again that did not pass, up to this many samples."),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="With --max-samples: stop after this many passes (1).")
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k", help="pass@k for these k; if not given: those of 1,2,4 up to --samples."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks, samples and intervals.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    engine_url: Annotated[
        str | None,
        typer.Option(help="Sample from this running engine. Its weights are replaced meanwhile."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Results file (RUN/eval_VERSION.json); a page is written next to it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override section.key of the run."),
    ] = None,
) -> None:
    """Measure a version of the policy: pass@k on held-out tasks, or wins at recorded states."""

    def measure() -> None:
        from rich.console import Console

        from opd.evaluation.asked import EvalOptions, check_asked

        options = EvalOptions(
            folder=run_folder,
            version=version,
            against=[] if against is None else _names(against),
            suite=suite,
            tasks=tasks,
            samples=samples,
            max_samples=max_samples,
            until=until,
            ks=None if k is None else _numbers(k),
            seed=seed,
            temperature=temperature,
            engine_url=engine_url,
            out=out,
            overrides=overrides or [],
        )
        check_asked(options)
        from opd.evaluation.command import evaluate as run  # imports torch

        _show(run(options, Console(stderr=True)), as_json)

    guarded(measure)


def _names(text: str) -> list[str]:
    """ "start,4" as versions. Raises StartupError."""
    from trainer.errors import StartupError

    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise StartupError(f"--against {text}: give versions, such as start,4,8")
    return names


def _numbers(text: str) -> list[int]:
    """ "1,2,4" as numbers, smallest first. Raises StartupError."""
    from trainer.errors import StartupError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise StartupError(f"--k {text}: give whole numbers from 1 up, such as 1,2,4")
    return sorted({int(part) for part in parts})


def _show(found: Evaluated, as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(found.values, indent=1))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, header, rows in found.tables:
        # Narrow, for a terminal of 80 columns.
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    typer.echo(f"{found.path} and {found.page} in {found.values['seconds']:.0f} s")
