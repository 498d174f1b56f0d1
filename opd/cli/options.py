"""What the commands' options have in common: how a run is named, how settings are overridden.

Every command on a run takes its folder, as `--run RUN`. Importing this loads nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from opd.cli.guarded import guarded

RunFolder = Annotated[Path, typer.Option("--run", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override section.key (repeatable)."),
]
WithParent = Annotated[
    bool, typer.Option("--exit-with-parent", hidden=True, help="End when standard input closes.")
]
PLAIN: dict[str, Any] = {
    # Plain help and plain errors: one line, whatever the width of the terminal.
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}
"""Arguments that every group of commands is created with."""


class RunCommand(TyperCommand):
    """A command on a run, refused before anything heavy is imported if there is no such run;
    `--config RUN/config.toml` means `--run RUN`, as it did in earlier versions.
    """

    def invoke(self, ctx: typer.Context) -> Any:
        """Like any command, once its run was found."""
        if self.needs_run(ctx):
            guarded(lambda: _found(ctx.params["run"]))
        return super().invoke(ctx)

    def needs_run(self, ctx: typer.Context) -> bool:
        """Whether a run is required."""
        return True

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Like any command, with the option's older name replaced."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*map(_renamed, args[:end]), *args[end:]])


class RunOrModelCommand(RunCommand):
    """A command on a run or, with --model, on a model before there is a run."""

    def needs_run(self, ctx: typer.Context) -> bool:
        """Only without a model."""
        return ctx.params.get("model") is None


def config_file(run: Path) -> Path:
    """The configuration of a run. Raises StartupError for a folder that is not a run."""
    file = run if run.suffix == ".toml" else run / "config.toml"
    if not file.is_file():
        from trainer.errors import StartupError

        what = "it has no config.toml" if file.parent.is_dir() else "no such folder"
        raise StartupError(f"--run {run}: {what}; name the folder of a run")
    return file


def _found(run: Path) -> None:
    config_file(run)


def _renamed(word: str) -> str:
    older = "--config"
    return f"--run{word[len(older) :]}" if word == older or word.startswith(f"{older}=") else word
