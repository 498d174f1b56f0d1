"""`opd keys`: the commands on a run's API keys."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from opd.cli.options import PLAIN, RunCommand, RunFolder, config_file
from opd.cli.records import show

app = typer.Typer(
    name="keys",
    help="Create, list, rotate and revoke the endpoint's API keys.",
    no_args_is_help=True,
    **PLAIN,
)

Limit = Annotated[int | None, typer.Option(min=1, help="Limit for this key [none].")]
KeyId = Annotated[str, typer.Argument(help="The key's id, as `opd keys list` shows it.")]


@app.command(cls=RunCommand)
def create(
    run: RunFolder,
    name: Annotated[str, typer.Option(help="What the key is for. Shown in lists.")] = "",
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Keys of one tenant share conversations [a new one, named after the id]."
        ),
    ] = None,
    consent: Annotated[
        Literal["train", "record", "none"],
        typer.Option(help="What requests may be used for: training, recording only, nothing."),
    ] = "train",
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    tokens_per_day: Limit = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of replies at the same time [no limit]."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The key may also read /metrics.")] = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    from opd.commands import keys as keys_commands

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
        "max_concurrent": max_concurrent,
    }
    show(lambda: keys_commands.create(config_file(run), name, tenant, consent, admin, limits))


@app.command("list", cls=RunCommand)
def list_keys(run: RunFolder) -> None:
    """List all keys, without their secrets."""
    from opd.commands import keys as keys_commands

    show(lambda: keys_commands.list_keys(config_file(run)))


@app.command(cls=RunCommand)
def rotate(
    run: RunFolder,
    key_id: KeyId,
    overlap: Annotated[
        float, typer.Option(min=0, help="Hours for which the old secret keeps working.")
    ] = 0.0,
) -> None:
    """Give a key a new secret and print it. Conversations, consent and tenant stay the same."""
    from opd.commands import keys as keys_commands

    show(lambda: keys_commands.rotate(config_file(run), key_id, overlap))


@app.command(cls=RunCommand)
def revoke(run: RunFolder, key_id: KeyId) -> None:
    """Disable a key for good."""
    from opd.commands import keys as keys_commands

    show(lambda: keys_commands.revoke(config_file(run), key_id))


@app.command(cls=RunCommand)
def log(run: RunFolder) -> None:
    """List who did what to which key, and when."""
    from opd.commands import keys as keys_commands

    show(lambda: keys_commands.log(config_file(run)))
