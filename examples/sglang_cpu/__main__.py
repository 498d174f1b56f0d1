"""`python -m examples.sglang_cpu`: what `./run.sh sglang` calls once SGLang is installed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.guarded import guarded
from opd.cli.options import PLAIN

LAB_MODEL = Path(__file__).parents[1] / "tool_lab" / "model"

app = typer.Typer(name="sglang", no_args_is_help=False, subcommand_metavar="[serve ...]", **PLAIN)


@app.callback(invoke_without_command=True)
def check(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a model of your own, which learns through adapters instead."),
    ] = None,
    updates: Annotated[int, typer.Option(min=1, help="Optimiser steps of the training run.")] = 6,
    eval_samples: Annotated[
        int, typer.Option(min=1, help="Answers measured for each skill, before and after.")
    ] = 120,
    run_folder: Annotated[
        Path | None, typer.Option("--run", help="New folder for everything [runs/sglang-TIME].")
    ] = None,
) -> None:
    """Everything on real SGLang: the engine contract, then a training run of the tool lab.

    Starts two servers on this machine's CPU with the lab's model and stops them. Ends with status 1
    if a test fails or success does not rise. With --model: `opd serve` on one such server, until
    --updates adapters were served; ends with status 1 if one is missing or was merged.
    """
    if context.invoked_subcommand is not None:
        return

    def start() -> None:
        from examples.sglang_cpu.adapter_run import check_adapters
        from examples.sglang_cpu.check import check_everything
        from trainer.errors import StartupError

        folder = run_folder or Path("runs") / time.strftime("sglang-%Y%m%d-%H%M%S")
        if folder.exists():
            raise StartupError(f"--run {folder}: already exists; the check needs a new folder")
        if model is None:
            is_well = check_everything(
                LAB_MODEL, folder, updates=updates, eval_samples=eval_samples
            )
        elif (model / "config.json").is_file():
            is_well = check_adapters(model, folder, updates=updates, samples=eval_samples)
        else:
            raise StartupError(f"--model {model}: no model there; ./run.sh models gets one")
        if not is_well:
            raise typer.Exit(1)

    guarded(start)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = LAB_MODEL,
    port: Annotated[int, typer.Option(help="Port; 0 lets the operating system choose.")] = 0,
    log: Annotated[Path, typer.Option(help="File for the server's output.")] = Path(
        "runs/sglang.log"
    ),
) -> None:
    """One server until Ctrl-C; options that are not listed here are SGLang's own."""

    def start() -> None:
        from examples.sglang_cpu.server import serve_forever

        serve_forever(model, log, context.args, port)

    guarded(start)


if __name__ == "__main__":
    app()
