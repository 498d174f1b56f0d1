"""`opd replay`: recorded sessions; `opd replay compare`: two replays of the same turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from opd.cli.guarded import guarded
from opd.cli.options import PLAIN, Overrides
from opd.replay.comparison.cli import compare_runs
from opd.replay.modes import ReplayMode


class _FilesByDefault(TyperGroup):
    """Words that are not commands are files: `opd replay FILE` means `opd replay run FILE`, in its
    help too.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_FilesByDefault,
    name="replay",
    help="Learn from recorded sessions: opd replay FILE|DIR... [OPTIONS]; compare two replays.",
    no_args_is_help=True,
    **PLAIN,
)


app.command("compare")(compare_runs)


@app.command("run")
def run(
    recordings: Annotated[
        list[Path], typer.Argument(help="Recordings: files, or folders with *.jsonl below them.")
    ],
    votes: Annotated[
        list[Path] | None,
        typer.Option(
            "--votes", metavar="FILE", help="A judge's votes on them, instead of asking a judge."
        ),
    ] = None,
    ask_judge: Annotated[
        bool, typer.Option("--ask-judge", help="With --votes: ask the judge about the other turns.")
    ] = False,
    mode: Annotated[
        str | None, typer.Option(help="rescore, resample or judge-only (default: rescore)")
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Practise the hints, as serve does, until they rest."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Start weights: folder or hub id (default: the tool lab's model)"),
    ] = None,
    run_folder: Annotated[
        Path, typer.Option("--run", help="Run folder. An existing one is resumed.")
    ] = Path("runs/replay"),
    into: Annotated[
        Path | None,
        typer.Option(
            help="Folder of another run to import the turns into, whether it is serving or not. "
            "Its own configuration applies."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with further settings.")] = None,
    overrides: Overrides = None,
) -> None:
    """Import recordings, judge, score and train on them, and write a report.

    `opd replay compare A B` compares what two settings made of the same turns.
    """

    def start() -> None:
        from typing import cast, get_args

        from rich.console import Console

        from opd.replay.run_replay import ReplayRequest, hand_over, replay
        from trainer.errors import StartupError

        if mode is not None and mode not in get_args(ReplayMode):
            raise StartupError(f"--mode {mode}: choose one of {', '.join(get_args(ReplayMode))}")
        request = ReplayRequest(
            recordings=tuple(recordings),
            votes=tuple(votes or ()),
            ask_judge=ask_judge,
            rehearse=rehearse,
            model=model,
            mode=cast("ReplayMode | None", mode),
            config_file=config,
            overrides=tuple(overrides or ()),
        )
        if into is None:
            replay(request, run_folder, Console())
            return
        given_words = {"--mode": mode, "--model": model, "--config": config}
        for name, given in {**given_words, "--rehearse": rehearse or None}.items():
            if given is not None:
                raise StartupError(f"{name}: {into / 'config.toml'} sets it; change it there")
        hand_over(request, into, Console())

    guarded(start)
