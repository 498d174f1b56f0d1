"""A run: its folder, its configuration and its processes.

    engines (policy, frozen), proxy, judge worker, trainer

`Run` starts the processes and stops them. The caller (the tool lab, `opd serve`) decides in which
order, what the agents do, and when the run ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

from opd.processes.answering import answers
from opd.processes.remote_engine import Role, check_engine
from opd.processes.roles.proxy_workers import start_endpoint
from opd.processes.supervisor import Patience, Supervisor
from opd.report.terminal.at_work import at_work
from opd.run import config as run_config
from opd.run.config import EngineConfig, RunConfig
from rollout_bridge.engine.keys import ensure_key_file
from rollout_bridge.engine.served import STAGED_FILE, ServedFile
from trainer.model.heap import heap_environment
from trainer.model.model_config import model_vocab_size

logger = logging.getLogger(__name__)

CALIBRATION_FILE, FINISH_FILE = "calibration.json", "finish"
"""Written by the trainer once its engines agree with it: from then on it trains."""
TRAINER_MEMORY = (
    "train adapters (trainer.lora.rank=8), set trainer.memory_gb, lower "
    "trainer.micro_batch_tokens, or keep contexts shorter"
)
ENGINE_MEMORY = "lower {role}.embedded.kv_cache_gib and {role}.embedded.prefix_cache_gib"
ENGINE_START_S = 300.0
"""A large model takes minutes to load; a wrong one fails at once."""
TRAINER_START_S = 1800.0
"""Then the trainer scores texts on engines that may be busy with agents; a wrong engine fails at
once.
"""


class Run:
    """The processes of one run, as an asynchronous context manager: none runs yet on entry, and
    none runs after exit.

    `judge_command` replaces the command line of the judge worker (controls inject their hints
    there).
    """

    def __init__(self, config: RunConfig, folder: Path, judge_command: list[str] | None = None):
        self.config = config
        self.folder = folder
        self._judge_command = judge_command or ["-m", "opd.cli.app", "judge"]
        self._config_file = folder / "config.toml"
        self.supervisor: Supervisor

    async def __aenter__(self) -> Run:
        run_config.save(self.config, self._config_file)
        self._make_keys()
        # An earlier command in this folder may have announced that no more turns would come.
        (self.folder / FINISH_FILE).unlink(missing_ok=True)
        # From engines that may be gone: the trainer writes anew what they serve.
        ServedFile(self.folder).remove()
        ServedFile(self.folder, STAGED_FILE).remove()
        self.supervisor = Supervisor(self.folder / "logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()

    def _make_keys(self) -> None:
        for engine in (self.config.policy, self.config.frozen):
            if engine.url is None and engine.embedded is not None and engine.embedded.api_key_file:
                ensure_key_file(engine.embedded.api_key_file)

    async def start_engines(self) -> None:
        """Start the run's own engines in parallel, wait until both answer, and check those that it
        does not own.
        """
        with at_work("starting the engines"):
            await asyncio.gather(
                self._start_engine("policy", self.config.policy),
                self._start_engine("frozen", self.config.frozen),
                self._start_teachers(),
            )

    async def start_endpoint(self) -> None:
        """Start the policy's engine and the endpoint: requests are answered and turns recorded even
        before `start_learners` has started what learns from them.

        A run that has trained starts its learners first: they bring the engine to the newest
        version, so that no request gets an older one.
        """
        if self._has_trained():
            await self.start_engines()
            await self.start_learning()
            await self.start_proxy()
            return
        with at_work("starting the policy's engine"):
            await asyncio.gather(
                self._start_engine("policy", self.config.policy), self.start_proxy()
            )

    async def start_learners(self) -> None:
        """Start what `start_endpoint` did not: teacher, judge and trainer."""
        if not self.supervisor.has("trainer"):
            with at_work("starting teacher, judge and trainer"):
                await self._start_engine("frozen", self.config.frozen)
                await self._start_teachers()
                await self.start_learning()

    def _has_trained(self) -> bool:
        return self._newest_version() > 0

    def _newest_version(self) -> int:
        steps = (self.folder / "checkpoints").glob("step_*")
        return max((int(path.name.removeprefix("step_")) for path in steps), default=0)

    async def start_learning(self) -> None:
        """Start judge worker and trainer: they work on what the store contains."""
        await asyncio.gather(self.start_judge(), self.start_trainer())

    async def start_proxy(self) -> None:
        """Start the endpoint, and wait until it answers."""
        arguments = ["-m", "opd.cli.app", "proxy", "--run", str(self.folder)]
        await start_endpoint(self.supervisor, self.config.proxy, arguments, ENGINE_START_S)

    async def start_judge(self) -> None:
        """Start the process of the judge and scoring workers."""
        arguments = [*self._judge_command, "--run", str(self.folder)]
        await self.supervisor.start("judge", arguments, _at_once, 60)

    async def start_trainer(self, *, may_finish: bool = False) -> None:
        """Start the trainer, and wait until its engines agree with it."""
        # One that an earlier start left behind would say "ready" too early.
        (self.folder / CALIBRATION_FILE).unlink(missing_ok=True)
        await self.supervisor.start(
            "trainer",
            ["-m", "opd.cli.app", "train", "--run", str(self.folder)],
            self._trainer_ready,
            TRAINER_START_S,
            may_finish=may_finish or self.config.trainer.max_steps is not None,
            environment=heap_environment(os.environ),
            patience=Patience(progress=self._newest_version, remedy=TRAINER_MEMORY),
        )

    def calibration_warnings(self) -> list[str]:
        """What the trainer found in the engines' scores that costs lessons."""
        found = json.loads((self.folder / CALIBRATION_FILE).read_text(encoding="utf-8"))
        return found["warnings"]

    async def _trainer_ready(self) -> bool:
        return (self.folder / CALIBRATION_FILE).exists()

    async def _start_engine(self, role: Role, engine: EngineConfig) -> None:
        if role == "frozen" and self.config.frozen.shared:
            return
        if engine.url is None:
            await self._start_embedded(role, engine.base_url, ENGINE_MEMORY.format(role=role))
            return
        for warning in await check_engine(role, self.config, model_vocab_size(self.config.model)):
            logger.warning("%s", warning)

    async def _start_teachers(self) -> None:
        """Start the engines of further teachers, one after the other: each loads a model."""
        for name, group in self.config.teachers.items():
            remedy = ENGINE_MEMORY.format(role=f"teachers.{name}")
            for number, url in enumerate(group.urls):
                await self._start_embedded(f"{name}.{number}", url, remedy)

    async def _start_embedded(self, role: str, url: str, remedy: str) -> None:
        arguments = ["-m", "opd.cli.app", "engine", "--role", role, "--run", str(self.folder)]
        await self.supervisor.start(
            f"engine_{role}",
            arguments,
            answers(f"{url}/health"),
            ENGINE_START_S,
            patience=Patience(progress=self._newest_version, remedy=remedy),
        )


async def _at_once() -> bool:
    return True
