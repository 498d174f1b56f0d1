"""`opd records`: the commands on a run's records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.cli.guarded import guarded
from opd.cli.options import PLAIN, RunCommand, RunFolder, config_file

if TYPE_CHECKING:
    from opd.commands.records import Outcome

app = typer.Typer(
    name="records",
    help="Keep, check and delete what a run recorded.",
    no_args_is_help=True,
    **PLAIN,
)


@app.command(cls=RunCommand)
def forget(
    run: RunFolder,
    session: Annotated[
        str | None, typer.Option(help="A session, by its id or by the name that the client gave.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="All sessions of an end user (`user` in the requests).")
    ] = None,
) -> None:
    """Delete sessions everywhere, and list the versions that were trained on them."""
    from opd.commands import records as records_commands

    show(lambda: records_commands.forget(config_file(run), session, user))


@app.command(cls=RunCommand)
def lineage(
    session: Annotated[
        str, typer.Argument(help="A session, by its id or by the name that the client gave.")
    ],
    run: RunFolder,
) -> None:
    """List the policy versions that were trained on a session, even a deleted one."""
    from opd.commands import records as records_commands

    show(lambda: records_commands.lineage(config_file(run), session))


@app.command(cls=RunCommand)
def backup(
    run: RunFolder,
    destination: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
) -> None:
    """Copy the database while it is in use, and verify the copy."""
    from opd.commands import records as records_commands

    show(lambda: records_commands.backup(config_file(run), destination))


@app.command(cls=RunCommand)
def restore(
    run: RunFolder,
    source: Annotated[Path, typer.Argument(help="A file that `opd records backup` wrote.")],
) -> None:
    """Restore a backup as the run's database. Nothing is overwritten."""
    from opd.commands import records as records_commands

    show(lambda: records_commands.restore(config_file(run), source))


@app.command(cls=RunCommand)
def verify(
    run: RunFolder,
    backup: Annotated[
        Path | None, typer.Option(help="Check this backup instead of the run's database.")
    ] = None,
) -> None:
    """Check schema, references, token checksums, turn states and checkpoints; change nothing."""
    from opd.commands import records as records_commands

    show(lambda: records_commands.verify(config_file(run), backup))


@app.command(cls=RunCommand)
def allow(
    text: Annotated[
        str, typer.Argument(help="The exact text, or its digest: sha256:... from doctor.")
    ],
    run: RunFolder,
) -> None:
    """Exempt a text from redaction, such as an address in an agent's tools."""
    from opd.commands import allowances

    guarded(lambda: typer.echo(allowances.allow(config_file(run), text)))


@app.command(cls=RunCommand)
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="The folder to write; nothing is overwritten.")],
    what: Annotated[
        str, typer.Option(help="Files to write: any of sessions, votes, hints, samples.")
    ] = "sessions,votes,hints,samples",
    file_format: Annotated[str, typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    dataset: Annotated[
        str | None,
        typer.Option(help="Write a training data set instead: sft, taught or preference."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only sessions active since this date, such as 2026-05-01 (UTC)."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Only this session, by its id or by the client's name.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="Only turns in this state: ready, trained, dropped ... (repeatable).",
        ),
    ] = None,
    no_ids: Annotated[
        bool, typer.Option("--no-ids", help="Leave token ids out. The model is not needed then.")
    ] = False,
) -> None:
    """Write the records as JSON lines or Parquet, or as a training data set."""

    def work() -> Outcome:
        from opd.export import command
        from opd.export.request import read_request

        request = read_request(
            what=what,
            file_format=file_format,
            dataset=dataset,
            since=since,
            session=session,
            states=state or [],
            with_ids=not no_ids,
        )
        return command.export(config_file(run), out, request)

    show(work)


def show(action: Callable[[], Outcome]) -> None:
    """Print an action's lines; the exit status is 1 unless all is well."""
    outcomes: list[Outcome] = []
    guarded(lambda: outcomes.append(action()))
    for line in outcomes[0].lines:
        typer.echo(line)
    if not outcomes[0].is_well:
        raise typer.Exit(1)
