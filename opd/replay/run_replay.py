"""`opd replay`: recorded sessions through import, judge, teacher and trainer, to the end.

The files and the settings are checked here; what then runs (`opd.replay.work`) takes a second to
import, and a failed start does not wait for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from opd.replay.modes import ReplayMode
from opd.replay.recordings.reading import check_recordings
from opd.run import config as run_config
from opd.run import recipe
from opd.run.defaults import resolve
from opd.run.folder import starting_in
from opd.run.resuming import (
    CONFIG_FILE,
    base_values,
    changes_since,
    is_run,
    refuse_other_settings,
    refuse_other_weights,
)
from opd.run.start_checks import check_start, check_store
from trainer.errors import StartupError

if TYPE_CHECKING:
    from opd.replay.taking_in import ImportReport
    from opd.run.config import RunConfig

LAB_MODEL = Path(__file__).parents[2] / "examples" / "tool_lab" / "model"
"""The model of a replay without `--model`: tiny, and part of the repository."""
# Recordings are few and long: a step takes a few whole sessions, which go through the model once.
DEFAULTS: dict[str, Any] = {"trainer": {"rollout_batch_size": 4, "whole_sessions": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What the command line asks for."""

    recordings: tuple[Path, ...]
    votes: tuple[Path, ...] = ()
    ask_judge: bool = False
    rehearse: bool = False
    model: str | None = None
    mode: ReplayMode | None = None
    config_file: Path | None = None
    overrides: tuple[str, ...] = ()


def replay(request: ReplayRequest, folder: Path, console: Console) -> dict[str, Any]:
    """Run the replay in `folder`, or continue it there; returns the summary that it writes.

    Raises StartupError if something cannot start, NothingLearned.
    """
    _check_files(request)
    values = _values(request, folder)
    refuse_other_settings(folder, request.config_file)
    with starting_in(folder):
        config = resolve(
            values,
            request.config_file,
            list(request.overrides),
            _check,
            recipe.recipe if request.rehearse and not is_run(folder) else None,
        )
        refuse_other_weights(folder, config)
        for change in changes_since(folder, config):
            console.print(f"changed: {change}", markup=False, soft_wrap=True)

        from opd.replay.work import replay_all

        return replay_all(config, folder, console, request.recordings, request.votes)


def _check(config: RunConfig) -> None:
    if config.rehearsal.enabled and config.replay.mode == "judge-only":
        raise StartupError("--rehearse: nothing trains in mode judge-only; choose another")
    if config.judge.review != "none":
        raise StartupError(
            "judge.review: a replay has no endpoint at which a person could see its hints; leave "
            "it out, or replay --into a run that serves"
        )
    check_start(config, serves=False)


def _check_files(request: ReplayRequest) -> None:
    for path in (*request.recordings, *request.votes):
        if not path.exists():
            raise StartupError(f"{path}: no such file or folder")
    try:
        check_recordings(request.recordings)
    except ValueError as error:
        raise StartupError(str(error)) from None


def _values(request: ReplayRequest, folder: Path) -> dict[str, Any]:
    values = base_values(folder, "replay", request.model, str(LAB_MODEL))
    if request.rehearse:
        values = run_config.merge(values, {"rehearsal": {"enabled": True}})
    elif not is_run(folder):
        values = run_config.merge(values, DEFAULTS)
    if request.votes or request.ask_judge:
        votes_only = not request.ask_judge
        values = run_config.merge(values, {"judge": {"recorded_votes_only": votes_only}})
    if request.mode is not None:
        values = run_config.merge(values, {"replay": {"mode": request.mode}})
    return values


def hand_over(request: ReplayRequest, folder: Path, console: Console) -> ImportReport:
    """Put recordings into the store of the run in `folder`, which may be serving agents.

    Its own processes judge, score and train on them, as its configuration says, after whatever live
    agents wait for; this only shows their progress. Raises StartupError.
    """
    _check_files(request)
    if not is_run(folder):
        raise StartupError(f"--into {folder}: no run there (it has no {CONFIG_FILE})")
    config = run_config.load(folder / CONFIG_FILE, list(request.overrides))
    check_store(config.store)
    if request.votes and not request.ask_judge and not config.judge.recorded_votes_only:
        console.print(
            "turns without recorded votes will be shown to the run's judge "
            "(its judge.recorded_votes_only is false)"
        )

    from opd.replay.work import give_to_run

    return give_to_run(config, folder, console, request.recordings, request.votes)
