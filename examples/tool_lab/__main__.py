"""`python -m examples.tool_lab`: the lab's command line, which `./run.sh` calls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.cli.guarded import guarded
from opd.cli.options import PLAIN, Overrides, RunCommand, RunFolder, WithParent, config_file

app = typer.Typer(name="tool-lab", no_args_is_help=False, subcommand_metavar="", **PLAIN)


@app.callback(invoke_without_command=True)
def lab(
    context: typer.Context,
    updates: Annotated[int, typer.Option(min=0, help="Optimiser steps to learn for.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of users and trainer.")] = 0,
    preferences: Annotated[
        str, typer.Option(help="What the users want: some of unit,order,title.")
    ] = "unit,order",
    open_users: Annotated[
        float, typer.Option(min=0, max=1, help="Share of users who ask openly for the default.")
    ] = 0.0,
    rehearsal: Annotated[
        bool,
        typer.Option(help="Practise hints like `serve`; else only users' own turns train."),
    ] = True,
    schedule: Annotated[
        str, typer.Option(help="When requests wait for training: sync, step_off or async.")
    ] = "async",
    hints: Annotated[
        str, typer.Option(help="judge, or a control: none, off-topic, contrary.")
    ] = "judge",
    eval_samples: Annotated[
        int, typer.Option(min=1, help="Answers measured for each skill, before and after.")
    ] = 512,
    sessions: Annotated[int, typer.Option(min=1, help="Conversations at the same time.")] = 24,
    pause_s: Annotated[
        float, typer.Option("--pause-s", min=0, help="Seconds of an agent between two turns.")
    ] = 0,
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Learning ends after this time at the latest.")
    ] = 300,
    run_folder: Annotated[
        Path | None, typer.Option("--run", help="New folder for the run [runs/lab-TIME].")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with further settings.")] = None,
    overrides: Overrides = None,
) -> None:
    """Watch the policy of a tiny agent learn from the reactions of its users."""
    if context.invoked_subcommand is not None:
        return

    def start() -> None:
        from pydantic import ValidationError

        from examples.tool_lab.lab_config import LabConfig
        from examples.tool_lab.run_lab import run
        from trainer.errors import StartupError

        try:
            settings = LabConfig.model_validate(
                {
                    "updates": updates,
                    "seed": seed,
                    "preferences": tuple(preferences.split(",")),
                    "open_users": open_users,
                    "rehearsal": rehearsal,
                    "schedule": schedule,
                    "pause_s": pause_s,
                    "hints": hints,
                    "eval_samples": eval_samples,
                    "sessions_in_flight": sessions,
                    "max_seconds": max_seconds,
                }
            )
        except ValidationError as error:
            raise StartupError(_wrong(error.errors()[0])) from None
        folder = run_folder or Path("runs") / time.strftime("lab-%Y%m%d-%H%M%S")
        if folder.exists():
            raise StartupError(f"--run {folder}: already exists; a lab run needs a new folder")
        run(settings, folder, config, overrides or [])

    guarded(start)


def _wrong(problem: Any) -> str:
    """The option that is meant, and what is wrong with it."""
    field = str(problem["loc"][0])
    option = "sessions" if field == "sessions_in_flight" else field.replace("_", "-")
    message = problem["msg"].removeprefix("Value error, ")
    return f"--{option}: {message[0].lower()}{message[1:]} (got {problem['input']!r})"


@app.command(hidden=True, cls=RunCommand)
def judge(
    run: RunFolder,
    hints: Annotated[str, typer.Option()] = "judge",
    overrides: Overrides = None,
    exit_with_parent: WithParent = False,
) -> None:
    """The judge worker of a lab run, with the hints of a control."""

    def start() -> None:
        from examples.tool_lab.controls import rewrite_for
        from examples.tool_lab.lab_config import LabConfig
        from opd.processes.roles.judge_role import run_judge

        mode = LabConfig.model_validate({"hints": hints}).hints
        run_judge(config_file(run), overrides or [], exit_with_parent, rewrite_for(mode))

    guarded(start)


if __name__ == "__main__":
    app()
