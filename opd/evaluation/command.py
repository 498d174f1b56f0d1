"""`opd eval`: checks the options, measures, and writes the results.

It reads a run's folder, even while the run goes on, and leaves the run's engines and records as
they are.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.evaluation.asked import (
    NO_FURTHER_TRIES,
    RECORDED,
    EvalOptions,
    check_asked,
    check_one_against,
    chosen_ks,
)
from opd.evaluation.measuring import Evaluation, Measured
from opd.evaluation.tasks import SUITES, SuiteRequest, load_suite
from opd.evaluation.weights import VersionWeights, find_weights
from opd.report.page import Table, write_report
from opd.run.config import RunConfig
from rollout_bridge.rendering.rendering import Rendering
from trainer.errors import StartupError

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The content of the file at `path` and the tables to print; `page` shows the same."""

    values: dict[str, Any]
    tables: Sequence[Table]
    path: Path
    page: Path


def evaluate(options: EvalOptions, console: Console) -> Evaluated:
    """Measure, write the results into the run's folder (or `--out`), return them. Progress goes to
    `console`.

    Raises StartupError for bad input, EngineError, StoreError.
    """
    config = check_asked(options)
    ks = chosen_ks(options)
    suite = options.suite or _default_suite(options.folder, config.model)
    if suite == RECORDED and options.max_samples is not None:
        raise StartupError(NO_FURTHER_TRIES)
    check_one_against(options, suite)
    evaluation = Evaluation(
        options=options,
        config=config,
        versions=_versions(options, config, is_recorded=suite == RECORDED),
        rendering=_rendering(config),
        console=console,
    )
    started = time.monotonic()
    if suite == RECORDED:
        measured = asyncio.run(evaluation.recorded())
    else:
        request = SuiteRequest(
            folder=options.folder, model=config.model, tasks=options.tasks, seed=options.seed
        )
        measured = asyncio.run(evaluation.tasks(load_suite(suite, request), ks))
    version, *against = evaluation.versions
    values = {
        "format": FORMAT,
        "suite": suite,
        "run": str(options.folder),
        "version": version.version,
        "against": [weights.version for weights in against],
        "weights": {weights.label: weights.path for weights in evaluation.versions},
        "samples": options.samples,
        "max_samples": options.max_samples,
        "until": options.until,
        "seed": options.seed,
        "temperature": options.temperature,
        "seconds": round(time.monotonic() - started, 2),
        **measured.values,
    }
    return _write(options, values, measured)


def _default_suite(folder: Path, model: str) -> str:
    """The lab's for a run of the lab, else recorded states, which any run has."""
    lab = importlib.import_module(SUITES["lab"].partition(":")[0])
    return "lab" if lab.suits(folder, model) else RECORDED


def _versions(
    options: EvalOptions, config: RunConfig, *, is_recorded: bool
) -> list[VersionWeights]:
    against = options.against or (["start"] if is_recorded else [])
    names = [options.version, *against]
    versions = [find_weights(options.folder, config.model, name) for name in names]
    for version, number in Counter(one.version for one in versions).items():
        if number > 1:
            raise StartupError(
                f"version {version} would be compared with itself; give another --version or "
                "--against"
            )
    return versions


def _rendering(config: RunConfig) -> Rendering:
    try:
        return Rendering.load(config.model, config.renderer)
    except ValueError as error:
        raise StartupError(str(error)) from None


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _write(options: EvalOptions, values: dict[str, Any], measured: Measured) -> Evaluated:
    """The results as JSON and as a page. Raises StartupError if they cannot be written."""
    stem = "eval_recorded" if values["suite"] == RECORDED else "eval"
    path = options.out or options.folder / f"{stem}_{values['version']}.json"
    page = options.folder / f"{stem}.html" if options.out is None else path.with_suffix(".html")
    shown = (
        "suite",
        "version",
        "against",
        "samples",
        "max_samples",
        "until",
        "temperature",
        "seed",
    )
    facts = [(name, _said(values[name])) for name in shown if values[name] not in (None, [])]
    try:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        write_report(
            page,
            title=f"Evaluation of {options.folder.name}",
            facts=facts,
            tables=measured.tables,
            curves=measured.curves,
            examples=None,
        )
    except OSError as error:
        raise StartupError(f"cannot write the results: {error}") from None
    return Evaluated(values=values, tables=measured.tables, path=path, page=page)
