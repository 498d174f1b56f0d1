"""`opd doctor` without a session: on a run, or on a model before there is a run."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opd.checkup.checks import Check, check_machine
from opd.commands.doctor_overview import overview, overview_lines
from opd.processes.answering import answers
from opd.processes.roles.judge import judge_config
from opd.run import config as run_config
from opd.run import recipe
from opd.run.config import RunConfig
from opd.run.defaults import resolve
from opd.run.resuming import base_values

NEW_RUN = Path("runs/serve")


def of_run(config_file: Path) -> dict[str, Any]:
    """The checks of a run and, if it has records, what has been dropped lately."""
    config = run_config.load(config_file)
    checks = _checks(config, config_file.parent)
    path = config.store.sqlite_path
    can_read = not any(one.name == "store" and one.remedy for one in checks)
    has_records = can_read and (path is None or path.is_file())
    return _values(checks) | {"dropped": overview(config_file) if has_records else []}


def of_model(model: str) -> dict[str, Any]:
    """The checks of a run that `opd serve` would begin with `model`."""
    folder = NEW_RUN / "doctor"
    config = resolve(base_values(folder, "serve", model), None, [], None, recipe.recipe)
    return _values(_checks(config, folder)) | {"dropped": []}


def shown(found: dict[str, Any]) -> list[str]:
    """The findings as text: each problem has its remedy below it."""
    lines: list[str] = []
    for one in found["checks"]:
        lines.append(f"{'--' if one['remedy'] else 'ok'} {one['name']}: {one['found']}")
        lines += [f"     {one['remedy']}"] if one["remedy"] else []
    return [*lines, *overview_lines(found["dropped"])]


def is_well(found: dict[str, Any]) -> bool:
    """Whether nothing needs a remedy."""
    return not found["dropped"] and all(one["remedy"] is None for one in found["checks"])


def _checks(config: RunConfig, folder: Path) -> list[Check]:
    return asyncio.run(_asked(config, folder))


async def _asked(config: RunConfig, folder: Path) -> list[Check]:
    proxy, judge = config.proxy, config.judge
    is_running = await answers(f"http://{proxy.host}:{proxy.port}/healthz")()
    checks = await asyncio.to_thread(
        lambda: list(check_machine(config, folder, is_running=is_running))
    )
    is_own = any(
        engine.url is None
        and engine.embedded is not None
        and judge.base_url == f"{engine.base_url}/v1"
        for engine in (config.policy, config.frozen)
    )
    if is_own and not is_running:
        words = "the run's own model: asked only while the run serves"
        return [*checks, Check(name="judge", found=words)]
    # Imported here: a machine can be checked without the judge's client.
    from opd.checkup.judge_probe import probe_judge

    return [*checks, *await probe_judge(judge_config(config))]


def _values(checks: list[Check]) -> dict[str, Any]:
    return {"checks": [asdict(one) for one in checks]}
