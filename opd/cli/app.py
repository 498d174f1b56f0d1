"""The command line. Heavy modules are imported after parsing, so `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.evaluate import evaluate
from opd.cli.guarded import guarded
from opd.cli.hints import app as hints_app
from opd.cli.keys import app as keys_app
from opd.cli.options import (
    PLAIN,
    Overrides,
    RunCommand,
    RunFolder,
    RunOrModelCommand,
    WithParent,
    config_file,
)
from opd.cli.plan import plan
from opd.cli.policy import app as policy_app
from opd.cli.records import app as records_app
from opd.cli.replay import app as replay_app

app = typer.Typer(
    name="opd",
    help="On-policy distillation from hindsight, for agents that use tools.",
    no_args_is_help=True,
    **{**PLAIN, "add_completion": True},
)

app.add_typer(records_app)
app.add_typer(keys_app)
app.add_typer(hints_app)
app.add_typer(replay_app)
app.add_typer(policy_app)
app.command(name="eval")(evaluate)
app.command()(plan)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option(help="Start weights: a local folder or a hub id; required for a new run."),
    ] = None,
    run_folder: Annotated[
        Path,
        typer.Option("--run", help="Run folder. An existing run is resumed with its own settings."),
    ] = Path("runs/serve"),
    renderer: Annotated[
        str | None,
        typer.Option(
            help="Renderer of the model: qwen3, glm-4.5, ... (default: its family's, if it fits)"
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the endpoint (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the endpoint (default: 8000).")
    ] = None,
    judge_url: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible URL of a judge (default: the model itself judges)."),
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="Model name of that judge.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with further settings of a new run.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Start the endpoint, the judge and the trainer: any agent can use the model, and it learns."""
    named = {
        "renderer": {"name": renderer},
        "proxy": {"host": host, "port": port},
        "judge": {"base_url": judge_url, "model": judge_model},
    }
    options = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in named.items()
    }

    def start() -> None:
        from opd.processes.serve import serve_forever

        serve_forever(model, run_folder, options, config, overrides or [])

    guarded(start)


@app.command(cls=RunCommand)
def train(
    run: RunFolder, overrides: Overrides = None, exit_with_parent: WithParent = False
) -> None:
    """Run only the embedded trainer, on the store of a run."""

    def start() -> None:
        from opd.processes.roles.trainer_role import run_trainer

        run_trainer(config_file(run), overrides or [], exit_with_parent)

    guarded(start)


@app.command(cls=RunCommand)
def judge(
    run: RunFolder, overrides: Overrides = None, exit_with_parent: WithParent = False
) -> None:
    """Run only the judge and scoring workers, on the store of a run."""

    def start() -> None:
        from opd.processes.roles.judge_role import run_judge

        run_judge(config_file(run), overrides or [], exit_with_parent)

    guarded(start)


@app.command(cls=RunCommand)
def proxy(
    run: RunFolder,
    overrides: Overrides = None,
    exit_with_parent: WithParent = False,
    worker: Annotated[
        str | None,
        typer.Option(hidden=True, help="Which worker this is, and what it has inherited."),
    ] = None,
) -> None:
    """Run only the OpenAI-compatible endpoint."""

    def start() -> None:
        from opd.processes.roles.proxy_role import run_proxy

        run_proxy(config_file(run), overrides or [], exit_with_parent, worker)

    guarded(start)


@app.command(cls=RunCommand)
def engine(
    run: RunFolder,
    role: Annotated[str, typer.Option(help="policy, frozen, or NAME.N of a teacher")],
    overrides: Overrides = None,
    exit_with_parent: WithParent = False,
) -> None:
    """Run one embedded engine."""

    def start() -> None:
        from opd.processes.roles.engine import run_engine

        run_engine(config_file(run), role, overrides or [], exit_with_parent)

    guarded(start)


@app.command(cls=RunCommand)
def status(
    run: RunFolder = Path("runs/serve"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it repeatedly, until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=1, help="Seconds between updates of --watch.")] = 5.0,
) -> None:
    """Show a run's status and what it learns from, also while it runs in another terminal."""

    def look() -> None:
        from opd.status.command import show

        every_s = every if watch else None
        show(config_file(run), as_json=as_json, every_s=every_s, say=typer.echo)

    guarded(look)


@app.command(cls=RunOrModelCommand)
def doctor(
    session: Annotated[
        str | None,
        typer.Argument(
            help="A session, by its id or by the name that the client gave. Without one: check "
            "machine, settings and judge, and list sessions of which every turn is dropped."
        ),
    ] = None,
    run: RunFolder = Path("runs/serve"),
    model: Annotated[
        str | None,
        typer.Option(help="Check a new run with this model (a folder or a hub id) instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain why each turn of a session was trained, is waiting or was dropped; or check the
    environment. Exit status 1: something is wrong.
    """

    def show() -> None:
        import json

        if session is None:
            from opd.checkup import command

            found = command.of_run(config_file(run)) if model is None else command.of_model(model)
            text = json.dumps(found, indent=2) if as_json else "\n".join(command.shown(found))
            typer.echo(text)
            if not command.is_well(found):
                raise typer.Exit(1)
            return
        from opd.commands.doctor import diagnose, lines

        sessions = diagnose(config_file(run), session)
        if as_json:
            typer.echo(json.dumps(sessions, indent=2, ensure_ascii=False))
        else:
            for line in lines(sessions):
                typer.echo(line)

    guarded(show)


@app.command(cls=RunCommand)
def advise(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which rollout correction a run needs, from the figures of its newest steps."""

    def show() -> None:
        from opd.commands import advise as command

        found = command.advise_run(config_file(run))
        typer.echo(command.as_json(found) if as_json else command.as_text(found))

    guarded(show)


@app.command()
def slime(
    config: Annotated[
        Path, typer.Option("--config", help="The run's settings (TOML); configs/ has examples.")
    ],
    run_folder: Annotated[
        Path | None,
        typer.Option(
            "--run", help="Run folder, on storage that all nodes share [runs/NAME_OF_CONFIG]."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print layout, files and commands; change nothing.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Train on a cluster: slime's job, the endpoint and the judge, from one configuration."""

    def start() -> None:
        from opd.cluster.launching.launch import launch

        folder = run_folder or Path("runs") / config.stem
        launch(config, overrides or [], folder, dry_run=dry_run)

    guarded(start)


def main() -> None:
    """Entry point of the `opd` command."""
    app()


if __name__ == "__main__":
    sys.exit(main())
