"""What a start needs of this machine: free ports, devices, a database, models. Checked by the
command itself, in a second, before it starts any process that would find out minutes later.
"""

from __future__ import annotations

import asyncio

from judge.verifier.config import VerifierConfig
from opd.guard.canaries import read_canaries
from opd.guard.config import GuardConfig
from opd.models.folder import check_model
from opd.processes.supervisor import listen_problem
from opd.run.config import EngineConfig, RunConfig
from opd.run.devices import check_device
from records.config import StoreConfig
from records.database.opening import check_readable, check_unlocked
from records.spill.spill import SpillFile
from rollout_bridge import tracing
from trainer.config import TrainerConfig
from trainer.errors import StartupError
from trainer.step.metrics import check_wandb


def check_start(config: RunConfig, *, serves: bool) -> None:
    """Raise StartupError, or StoreError, with a line for the first thing that is missing."""
    _check_ports(config, serves)
    check_device("trainer.device", config.trainer.device)
    check_engines(config)
    check_store(config.store)
    check_canaries(config.guard)
    check_verifier(config.verifier)
    check_curves(config.trainer)
    check_traces()
    if serves and config.store.spill_path.parent.is_dir():  # else a new run's, like the store
        check_spill(config.store)


def check_engines(config: RunConfig) -> None:
    """Raise StartupError if an embedded engine of this run has no device or no model."""
    for role, engine in _embedded(config).items():
        assert engine.embedded is not None
        check_device(f"{role}.embedded.device", engine.embedded.device)
        if engine.embedded.model != config.model:
            check_model(engine.embedded.model)
    check_model(config.model)


def check_canaries(guard: GuardConfig) -> None:
    """Raise StartupError for a file of canaries that cannot be used."""
    if guard.canaries is not None:
        read_canaries(guard.canaries)


def check_verifier(verifier: VerifierConfig) -> None:
    """Raise StartupError for a function that cannot be called."""
    if verifier.source is None:
        return
    from judge.verifier.calls import why_not_found

    why = asyncio.run(why_not_found(verifier.source))
    if why is not None:
        raise StartupError(f"verifier.source: {verifier.source} cannot be called: {why}")


def check_curves(trainer: TrainerConfig) -> None:
    """Raise StartupError if metrics are to go where nothing is installed that sends them."""
    if trainer.wandb is not None:
        check_wandb()


def check_traces() -> None:
    """Raise StartupError for a collector of traces that cannot be sent to."""
    why = tracing.problem()
    if why is not None:
        raise StartupError(why)


def check_store(config: StoreConfig) -> None:
    """Raise StoreError for a database that cannot be opened now."""
    path = config.sqlite_path
    if path is not None and not path.exists():
        return  # of a new run: it is created with its folder
    check_unlocked(config)
    asyncio.run(check_readable(config))


def check_spill(config: StoreConfig) -> None:
    """Raise StoreError if nothing can be kept that the database refuses."""
    is_new = not config.spill_path.exists()
    check_spill_file(config)
    if is_new:
        config.spill_path.rmdir()  # a failed start leaves nothing behind


def check_spill_file(config: StoreConfig) -> None:
    """The same, for one of several processes that are starting: the folder stays."""
    SpillFile.create(config.spill_path, config.spill_reserve_bytes).remove()


def check_listening(role: str, host: str, port: int) -> None:
    """Raise StartupError if nothing can listen there; `role` is the section of the settings."""
    problem = listen_problem(host, port)
    if problem is not None:
        raise StartupError(f"{role}.{problem[0]}: {problem[1]}")


def _check_ports(config: RunConfig, serves: bool) -> None:
    wanted = {"proxy": (config.proxy.host, config.proxy.port)} if serves else {}
    for role, engine in _embedded(config).items():
        assert engine.embedded is not None
        wanted[f"{role}.embedded"] = (engine.embedded.host, engine.embedded.port)
    taken: dict[int, str] = {}
    for role, (host, port) in wanted.items():
        if port and (other := taken.setdefault(port, role)) != role:
            raise StartupError(f"{role}.port and {other}.port are both {port}: change one of them")
        check_listening(role, host, port)


def _embedded(config: RunConfig) -> dict[str, EngineConfig]:
    """The engines that this run starts, by their sections."""
    engines = {"policy": config.policy, "frozen": config.frozen}
    return {
        role: engine
        for role, engine in engines.items()
        if engine.url is None
        and engine.embedded is not None
        and not (role == "frozen" and config.frozen.shared)
    }
