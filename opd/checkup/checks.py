"""The checks: each reports what it found and, if something is wrong, what to do."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opd.models.folder import check_model
from opd.processes.roles.proxy_workers import workers_warnings
from opd.processes.run import CALIBRATION_FILE
from opd.processes.supervisor import listen_problem
from opd.run.config import RunConfig
from opd.run.devices import check_device, num_cuda_devices
from opd.run.start_checks import check_store
from records.errors import StoreError
from trainer.errors import StartupError

LEAST_FREE_BYTES = 2 * 2**30
"""Records, logs and a few checkpoints of a small model."""
_SHOWN_VERSIONS = ("hindsight-opd", "torch", "transformers", "renderers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. No remedy means that all is well."""

    name: str
    found: str
    remedy: str | None = None


def check_machine(config: RunConfig, folder: Path, *, is_running: bool) -> Iterator[Check]:
    """All checks except the judge's. `is_running`: the run itself uses its ports."""
    yield _versions()
    yield _disk(folder)
    yield from _ports(config, is_running=is_running)
    yield from _workers(config)
    yield _device(config)
    yield _store(config)
    model = _model(config)
    yield model
    if model.remedy is None:
        yield from _renderer(config)
    yield _calibration(folder)


def _versions() -> Check:
    found = [f"Python {platform.python_version()}"]
    missing: list[str] = []
    for name in _SHOWN_VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    remedy = f"install {', '.join(missing)}: ./run.sh creates the environment" if missing else None
    return Check(name="versions", found=", ".join(found), remedy=remedy)


def _disk(folder: Path) -> Check:
    there = next(one for one in (folder.resolve(), *folder.resolve().parents) if one.exists())
    free = shutil.disk_usage(there).free
    is_low = free < LEAST_FREE_BYTES
    remedy = "free some space, use a run folder on another disk, or keep fewer checkpoints: "
    return Check(
        name="disk",
        found=f"{free / 2**30:.1f} GiB free at {there}",
        remedy=f"{remedy}trainer.keep_checkpoints" if is_low else None,
    )


def _ports(config: RunConfig, *, is_running: bool) -> Iterator[Check]:
    if is_running:
        where = f"{config.proxy.host}:{config.proxy.port}"
        yield Check(name="ports", found=f"the run's endpoint answers at {where}")
        return
    wanted = {"proxy": (config.proxy.host, config.proxy.port)}
    for role, engine in (("policy", config.policy), ("frozen", config.frozen)):
        if (
            engine.url is None
            and engine.embedded is not None
            and not (role == "frozen" and config.frozen.shared)
        ):
            wanted[f"{role}.embedded"] = (engine.embedded.host, engine.embedded.port)
    for section, (host, port) in wanted.items():
        problem = listen_problem(host, port)
        remedy = None
        if problem is not None:
            option = " (or serve --port)" if section == "proxy" else ""
            remedy = f"set {section}.{problem[0]}{option}"
        found = f"{section}: {host}:{port} is free" if problem is None else problem[1]
        yield Check(name="ports", found=found, remedy=remedy)


def _workers(config: RunConfig) -> Iterator[Check]:
    for warning in workers_warnings(config.proxy):
        yield Check(name="workers", found=warning, remedy="lower proxy.workers")


def _device(config: RunConfig) -> Check:
    wanted = {"trainer.device": config.trainer.device}
    for role, engine in (("policy", config.policy), ("frozen", config.frozen)):
        if engine.url is None and engine.embedded is not None:
            wanted[f"{role}.embedded.device"] = engine.embedded.device
    for key, device in wanted.items():
        try:
            check_device(key, device)
        except StartupError as error:
            return Check(
                name="device", found=str(error), remedy=f"set {key} = cpu, or as the message says"
            )
    gpus = num_cuda_devices()
    used = ", ".join(sorted(set(wanted.values())))
    return Check(name="device", found=f"{used}; {gpus or 'no'} NVIDIA GPU{'s' * (gpus != 1)} here")


def _store(config: RunConfig) -> Check:
    try:
        check_store(config.store)
    except StoreError as error:
        return Check(
            name="store", found=str(error), remedy="check store.url and that its server runs"
        )
    path = config.store.sqlite_path
    is_new = path is not None and not path.exists()
    return Check(name="store", found="will be created" if is_new else "can be opened")


def _model(config: RunConfig) -> Check:
    try:
        check_model(config.model)
    except StartupError as error:
        return Check(
            name="model", found=str(error), remedy="name a folder or a hub id that has weights"
        )
    return Check(name="model", found=config.model)


def _renderer(config: RunConfig) -> Iterator[Check]:
    from opd.models.renderer_notes import renderer_note, template_notes
    from rollout_bridge.rendering.rendering import Rendering

    try:
        rendering = Rendering.load(config.model, config.renderer)
    except (ValueError, OSError) as error:
        yield Check(
            name="renderer", found=str(error), remedy="name the model's family: renderer.name"
        )
        return
    note = renderer_note(rendering, config.renderer)
    yield Check(name="renderer", found=note.found, remedy=note.remedy)
    notes = template_notes(rendering)
    for one in notes:
        yield Check(name="template", found=one.found, remedy=one.remedy)
    if not notes:
        yield Check(name="template", found="shows messages, tools and replies")


def _calibration(folder: Path) -> Check:
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return Check(name="calibration", found="not done yet: the trainer does it when it starts")
    found = json.loads(path.read_text(encoding="utf-8"))
    worst = max(found["engines"].items(), key=lambda one: one[1]["max_abs"])
    words = (
        f"noise {found['noise']:.2g} nats; the engine {worst[0]} differs by "
        f"{worst[1]['max_abs']:.2g} nats at most (allowed: {found['bound']:g})"
    )
    if not found["warnings"]:
        return Check(name="calibration", found=words)
    said = "; ".join(found["warnings"])
    return Check(
        name="calibration",
        found=f"{words}; {said}",
        remedy="use the same precision for engines and trainer (docs/weight_updates.md)",
    )
