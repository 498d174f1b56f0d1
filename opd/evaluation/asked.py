"""The options of an evaluation, and whether they are possible: checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.start_checks import check_engines
from trainer.errors import StartupError

RECORDED = "recorded"
DEFAULT_KS = (1, 2, 4)
NO_FURTHER_TRIES = "--max-samples: an answer at a recorded state does not pass or fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The options; None means the default that fits."""

    folder: Path
    version: str = "latest"
    against: Sequence[str] = ()
    suite: str | None = None
    tasks: int = 64
    samples: int = 4
    max_samples: int | None = None
    until: int | None = None
    ks: Sequence[int] | None = None
    seed: int = 0
    temperature: float = 1.0
    engine_url: str | None = None
    out: Path | None = None
    overrides: list[str] = field(default_factory=list)


def check_asked(options: EvalOptions) -> RunConfig:
    """The configuration of the run. Raises StartupError for what cannot be measured."""
    config_file = options.folder / "config.toml"
    if not config_file.is_file():
        raise StartupError(f"--run {options.folder}: no config.toml in it; give a run's folder")
    for folder in [options.out.parent] if options.out is not None else []:
        if not folder.is_dir():
            raise StartupError(f"--out {options.out}: no folder {folder}; create it first")
    config = run_config.load(config_file, options.overrides)
    chosen_ks(options)
    check_one_against(options, options.suite)
    _check_further_tries(options)
    check_engines(config)
    return config


def check_one_against(options: EvalOptions, suite: str | None) -> None:
    """Raises StartupError if recorded states should compare more than two versions."""
    if suite == RECORDED and len(options.against) > 1:
        raise StartupError(
            f"--against {','.join(options.against)}: recorded states compare two versions; give "
            "one, or a suite of tasks (--suite)"
        )


def chosen_ks(options: EvalOptions) -> Sequence[int]:
    """The k of pass@k. Raises StartupError for more than there are samples."""
    if options.ks is None:
        return [k for k in DEFAULT_KS if k <= options.samples]
    largest = max(options.ks)
    if largest > options.samples:
        raise StartupError(
            f"--k {largest}: pass@{largest} needs at least {largest} samples of each task, and "
            f"--samples is {options.samples}"
        )
    return options.ks


def _check_further_tries(options: EvalOptions) -> None:
    if options.max_samples is None:
        if options.until is not None:
            raise StartupError(f"--until {options.until}: it ends further tries; set --max-samples")
        return
    if options.suite == RECORDED:
        raise StartupError(NO_FURTHER_TRIES)
    if options.max_samples <= options.samples:
        raise StartupError(
            f"--max-samples {options.max_samples}: give more than --samples {options.samples}"
        )
    if (options.until or 1) > options.max_samples:
        raise StartupError(
            f"--until {options.until}: only --max-samples {options.max_samples} tries are made"
        )
