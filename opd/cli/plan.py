"""`opd plan`: how much memory a model's run needs, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.guarded import guarded
from opd.cli.options import Overrides

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_ON_GPU = ("policy.embedded.device=cuda", "frozen.embedded.device=cuda", "trainer.device=cuda")


def plan(
    model: Annotated[str, typer.Option(help="A local folder with a config.json, or a hub id.")],
    memory: Annotated[
        str | None, typer.Option(help="Main memory to fit into, such as 16G [this machine's].")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Memory of one GPU, such as 24G. Engine and trainer share it."),
    ] = None,
    context: Annotated[
        int, typer.Option(min=16, help="Maximum tokens of a text, including the answer.")
    ] = 2048,
    requests: Annotated[int, typer.Option(min=1, help="Requests answered at the same time.")] = 8,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the settings of the run.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show how much memory a model needs, part by part, and what to change if it does not fit.
    Reads the model's config.json; needs no weights.
    """

    def say() -> None:
        from opd.plan.memory import Load
        from opd.plan.run_plan import memory_of_machine
        from opd.plan.said import planned_lines
        from opd.run.defaults import as_planned
        from opd.run.recipe import recipe

        settings = [*(_ON_GPU if gpu is not None else ()), *(overrides or [])]
        lines = planned_lines(
            as_planned(model, config, settings, recipe),
            Load(context=context, requests=requests),
            memory=memory_of_machine() if memory is None else bytes_of(memory, "--memory"),
            gpu=None if gpu is None else bytes_of(gpu, "--gpu"),
        )
        typer.echo("\n".join(lines))

    guarded(say)


def bytes_of(text: str, option: str) -> float:
    """`16G` in bytes, by powers of 1,024. Raises StartupError for anything else."""
    from trainer.errors import StartupError

    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise StartupError(f"{option} {text}: give a size such as 16G or 800M")
    return float(found[1]) * 1024.0 ** " KMGT".index((found[2] or " ").upper())
