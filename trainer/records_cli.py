"""`opd records`: the commands on a run's records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trainer.records_commands import Outcome

app = typer.Typer(name="records", help="Keep, check and delete what a run recorded.")

ConfigFile = Annotated[
    Path, typer.Option("--config", help="The run's configuration: config.toml of its folder.")
]


@app.command()
def forget(
    config: ConfigFile,
    session: Annotated[
        str | None, typer.Option(help="A session, by its id or by the name that the client gave.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="All sessions of an end user (`user` in the requests).")
    ] = None,
) -> None:
    """Delete sessions everywhere, and say which policy versions were trained on them."""
    from trainer import records_commands

    show(lambda: records_commands.forget(config, session, user))


@app.command()
def backup(
    config: ConfigFile,
    destination: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
) -> None:
    """Copy the database while it is used, and verify the copy."""
    from trainer import records_commands

    show(lambda: records_commands.backup(config, destination))


@app.command()
def restore(
    config: ConfigFile,
    source: Annotated[Path, typer.Argument(help="A file that `opd records backup` wrote.")],
) -> None:
    """Bring a backup back as the run's database. Nothing is overwritten."""
    from trainer import records_commands

    show(lambda: records_commands.restore(config, source))


@app.command()
def verify(
    config: ConfigFile,
    backup: Annotated[
        Path | None, typer.Option(help="Check this backup instead of the run's database.")
    ] = None,
) -> None:
    """Check schema, references, token checksums, turn states and checkpoints; change nothing."""
    from trainer import records_commands

    show(lambda: records_commands.verify(config, backup))


def show(action: Callable[[], Outcome]) -> None:
    """Print what an action says; the exit status is 1 unless all is well."""
    from trainer.cli import guarded

    outcomes: list[Outcome] = []
    guarded(lambda: outcomes.append(action()))
    for line in outcomes[0].lines:
        typer.echo(line)
    if not outcomes[0].is_well:
        raise typer.Exit(1)
