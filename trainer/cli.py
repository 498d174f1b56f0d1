"""The command line. Heavy modules are imported after parsing, so `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer.eval_cli import evaluate
from trainer.guarded import guarded
from trainer.keys_cli import app as keys_app
from trainer.records_cli import app as records_app
from trainer.replay_cli import app as replay_app

app = typer.Typer(
    name="opd",
    help="On-policy distillation from hindsight, for agents that use tools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(records_app)
app.add_typer(keys_app)
app.add_typer(replay_app)
app.command(name="eval")(evaluate)

ConfigFile = Annotated[Path, typer.Option("--config", help="The run's configuration (TOML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value: section.key=value (repeatable)."),
]
WithParent = Annotated[
    bool, typer.Option("--exit-with-parent", hidden=True, help="End when standard input closes.")
]


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Start weights: a local folder or a hub id.")],
    run_folder: Annotated[
        Path, typer.Option("--run", help="Run folder; one that exists is resumed.")
    ] = Path("runs/serve"),
    renderer: Annotated[
        str | None,
        typer.Option(
            help="Renderer of the model: qwen3, glm-4.5, ... (default: its family's, if it fits)"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the endpoint.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the endpoint.")] = 8000,
    judge_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible URL of another judge.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="Model name of that judge.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with further settings.")] = None,
    overrides: Overrides = None,
) -> None:
    """Put the whole loop behind an OpenAI-compatible endpoint, for any agent."""
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
        from trainer.serve import serve_forever

        serve_forever(model, run_folder, options, config, overrides or [])

    guarded(start)


@app.command()
def train(
    config: ConfigFile, overrides: Overrides = None, exit_with_parent: WithParent = False
) -> None:
    """The embedded trainer alone, on the store of a run."""

    def start() -> None:
        from trainer.processes import run_trainer

        run_trainer(config, overrides or [], exit_with_parent)

    guarded(start)


@app.command()
def judge(
    config: ConfigFile, overrides: Overrides = None, exit_with_parent: WithParent = False
) -> None:
    """The judge and scoring workers alone, on the store of a run."""

    def start() -> None:
        from trainer.processes import run_judge

        run_judge(config, overrides or [], exit_with_parent)

    guarded(start)


@app.command()
def proxy(
    config: ConfigFile, overrides: Overrides = None, exit_with_parent: WithParent = False
) -> None:
    """The OpenAI-compatible endpoint alone."""

    def start() -> None:
        from trainer.processes import run_proxy

        run_proxy(config, overrides or [], exit_with_parent)

    guarded(start)


@app.command()
def engine(
    config: ConfigFile,
    role: Annotated[str, typer.Option(help="policy or frozen")],
    overrides: Overrides = None,
    exit_with_parent: WithParent = False,
) -> None:
    """One embedded engine alone."""

    def start() -> None:
        from trainer.processes import run_engine

        run_engine(config, role, overrides or [], exit_with_parent)

    guarded(start)


@app.command()
def doctor(
    session: Annotated[
        str, typer.Argument(help="A session, by its id or by the name that the client gave.")
    ],
    config: Annotated[
        Path, typer.Option("--config", help="The run's configuration: config.toml of its folder.")
    ] = Path("runs/serve/config.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Why each turn of a session was trained, waits, or was dropped."""

    def show() -> None:
        import json

        from trainer.doctor import diagnose, lines

        sessions = diagnose(config, session)
        if as_json:
            typer.echo(json.dumps(sessions, indent=2, ensure_ascii=False))
        else:
            for line in lines(sessions):
                typer.echo(line)

    guarded(show)


@app.command()
def slime(
    config: ConfigFile,
    run_folder: Annotated[
        Path | None,
        typer.Option("--run", help="Run folder, on storage of all nodes [runs/NAME_OF_CONFIG]."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print layout, files and commands; change nothing.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Training on a cluster: slime's job, the endpoint and the judge, from one configuration."""

    def start() -> None:
        from trainer.cluster.launch import launch

        folder = run_folder or Path("runs") / config.stem
        launch(config, overrides or [], folder, dry_run=dry_run)

    guarded(start)


def main() -> None:
    """Entry point of the `opd` command."""
    app()


if __name__ == "__main__":
    sys.exit(main())
