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
    """Write a version's full weights, any adapter merged in, as a Hugging Face folder."""

    def write() -> None:
        from opd.commands.policy_export import export_version

        typer.echo(export_version(config_file(run), version, to))

    guarded(write)


@app.command("list", cls=RunCommand)
def list_(run: RunFolder) -> None:
    """List the versions, and which were withdrawn."""

    def show() -> None:
        from opd.commands.policy_versions import list_versions

        typer.echo(list_versions(config_file(run)))

    guarded(show)


@app.command(cls=RunCommand)
def rollback(
    run: RunFolder,
    version: Annotated[int, typer.Option(help="The version to go back to.")],
) -> None:
    """Publish a new version with an older one's weights and optimiser."""

    def order() -> None:
        from opd.commands.policy_versions import roll_back

        typer.echo(roll_back(config_file(run), version))

    guarded(order)


@app.command(cls=RunCommand)
def show(run: RunFolder, version: Annotated[int, typer.Option(help="The version.")]) -> None:
    """Show what is known about a version: its step and its measurements."""

    def look() -> None:
        from opd.commands.policy_versions import show as shown

        typer.echo(shown(config_file(run), version))

    guarded(look)


@app.command(cls=RunCommand)
def compare(
    run: RunFolder,
    version: Annotated[int, typer.Option(help="The version to compare with.")],
    against: Annotated[int, typer.Option(help="The other version.")],
) -> None:
    """Compare the measurements of two versions, and show what was trained between them."""

    def look() -> None:
        from opd.commands.policy_versions import compare as compared

        typer.echo(compared(config_file(run), version, against))

    guarded(look)


@app.command(cls=RunCommand)
def pin(
    run: RunFolder, version: Annotated[int, typer.Option(help="The version to serve.")]
) -> None:
    """Serve a version and pause training until `policy resume`."""

    def order() -> None:
        from opd.commands.policy_versions import pin as pinned

        typer.echo(pinned(config_file(run), version))

    guarded(order)


@app.command(cls=RunCommand)
def resume(run: RunFolder) -> None:
    """Resume training after a stop."""

    def go_on() -> None:
        from opd.commands.policy_versions import resume as take_stop_away

        typer.echo(take_stop_away(config_file(run)))

    guarded(go_on)
