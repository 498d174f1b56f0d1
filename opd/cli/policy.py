"""`opd policy`: the commands on what a run has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opd.cli.guarded import guarded
from opd.cli.options import PLAIN, RunCommand, RunFolder, config_file

app = typer.Typer(name="policy", help="What a run has trained.", no_args_is_help=True, **PLAIN)


@app.command(cls=RunCommand)
def export(
    run: RunFolder,
    to: Annotated[Path, typer.Option("--to", help="The folder to write; it must not exist.")],
    version: Annotated[
        str, typer.Option(help="Version to write: a number, latest or start.")
    ] = "latest",
) -> None:
    """Write a version's full weights, an adapter added in, as a Hugging Face folder."""

    def write() -> None:
        from opd.commands.policy_export import export_version

        typer.echo(export_version(config_file(run), version, to))

    guarded(write)
