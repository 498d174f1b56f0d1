"""`opd hints`: the commands on what a run has learned from objections."""

from __future__ import annotations

from typing import Annotated

import typer

from opd.cli.options import PLAIN, RunCommand, RunFolder, config_file
from opd.cli.records import show as shown

app = typer.Typer(
    name="hints",
    help="List, show and delete hints: what was learned from objections.",
    no_args_is_help=True,
    **PLAIN,
)

HintId = Annotated[str, typer.Argument(help="The hint's id, as `opd hints list` shows it.")]


@app.command("list", cls=RunCommand)
def list_hints(
    run: RunFolder,
    status: Annotated[
        str | None, typer.Option(help="Only hints with this status, such as active [all].")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only hints of this tenant [all].")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of hints to list.")] = 50,
) -> None:
    """List hints, newest first, one line each."""
    from opd.commands import hints as hints_commands

    shown(lambda: hints_commands.list_hints(config_file(run), status, tenant, limit))


@app.command(cls=RunCommand)
def show(run: RunFolder, hint_id: HintId) -> None:
    """Show a hint, where it came from, and what was written for its lessons."""
    from opd.commands import hints as hints_commands

    shown(lambda: hints_commands.show(config_file(run), hint_id))


@app.command(cls=RunCommand)
def delete(run: RunFolder, hint_id: HintId) -> None:
    """Delete a hint, and list the versions of the policy that were trained on it."""
    from opd.commands import hints as hints_commands

    shown(lambda: hints_commands.delete(config_file(run), hint_id))
