"""A launch on a cluster: carries a plan out, follows the job, and stops what it started.

    Ray's head -> the other nodes join -> the job -> RUN/engines.json -> endpoint, judge worker

Only processes of this launch are stopped: Ray's head and the job through the commands that started
them, the rest as children. Nothing is looked up by name.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
from collections.abc import Awaitable, Callable

import aiohttp
from rich.console import Console

from opd.cluster.files import custom_file
from opd.cluster.launching.held import Held, LaunchError, run_to_end
from opd.cluster.plan import LaunchPlan, engine_overrides
from opd.cluster.show import draw, wrap
from opd.commands.keys import refuse_open_door
from opd.processes.answering import answers
from opd.processes.proxy_workers import start_endpoint
from opd.processes.serving import until_stopped
from opd.processes.supervisor import Supervisor
from opd.report.cluster_steps import ClusterSteps
from opd.report.curves import metric_rows
from opd.report.health import said_warnings
from opd.report.run_report import write_run_report
from opd.report.status import status_line
from opd.run import config as run_config
from records.database.private_files import private_folder
from records.errors import StoreError, StoreUnavailable
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.slime.handovers import weight_start_version

STATUS_EVERY_S = 60.0
POLL_S = 2.0
NO_AGENT = b"No available agent"
SUBMIT_ATTEMPTS = 10
STOP_JOB_S = 120.0


def carry_out(plan: LaunchPlan) -> None:
    """Start what the plan says, and follow the job until it or the user ends it."""
    asyncio.run(_launch(plan))


async def _launch(plan: LaunchPlan) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console()
    for line in (plan.flags.text, *plan.warnings, draw(plan.layout)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    # The store first: to find out that it cannot be reached takes a second here, and minutes later.
    private_folder(plan.paths.run)
    try:
        opened = await Store.open(plan.config.store)
    except StoreUnavailable as error:
        raise LaunchError(f"store.url: {error}") from None
    async with opened as store:
        start_version = await weight_start_version(store, plan.paths.run)
        _write(plan, start_version)
        await refuse_open_door(plan.config, store, plan.paths.config)
        await until_stopped(stop, Launch(plan, store, console, start_version).run())
    console.print("stopped")


class Launch:
    """The processes of one launch."""

    def __init__(self, plan: LaunchPlan, store: Store, console: Console, start_version: int):
        self._plan = plan
        self._store = store
        self._console = console
        self._start_version = start_version
        logs = plan.paths.launch
        self._ray = Held("Ray", plan.commands.ray_head, logs / "ray.log")
        self._job = Held("slime's job", plan.commands.submit, logs / "slime.log")
        self._children = Supervisor(logs)
        self._steps = ClusterSteps(plan.paths.run)
        self._started_at = time.time()

    async def run(self) -> None:
        """Start all, follow the job to its end, stop all. Raises for anything that ends early."""
        submitted = False
        try:
            await self._start_ray()
            submitted = True
            await self._submit()
            addresses = await self._engines()
            await self._start_children(engine_overrides(self._plan.config, addresses))
            await self._follow()
        finally:
            await self._children.stop("proxy")
            if submitted and self._job.status is None:
                self._say("stopping the job")
                await run_to_end(self._plan.commands.stop_job, STOP_JOB_S)
            await self._children.stop()
            await self._job.stop()
            await self._ray.stop()
            await self._report()

    async def _start_ray(self) -> None:
        cluster = self._plan.cluster
        self._say(f"starting Ray; log {self._ray.log}")
        if cluster.nodes > 1:
            self._say(f"run this on each other node ({cluster.nodes - 1}):")
            self._console.print(wrap(self._plan.commands.ray_worker), markup=False, soft_wrap=True)
        await self._ray.start()
        seen: list[dict[str, object]] = []

        async def joined() -> bool:
            status, output = await run_to_end(self._plan.commands.ray_nodes, 60.0)
            nodes = json.loads(output) if status == 0 else []
            if nodes != seen:
                seen[:] = nodes
                shown = ", ".join(f"{node['ip']} ({node['gpus']} GPUs)" for node in nodes)
                self._say(f"nodes: {shown}")
            wrong = [node for node in nodes if node["gpus"] not in (0, cluster.gpus_per_node)]
            if wrong:
                raise LaunchError(
                    f"node {wrong[0]['ip']} joined with {wrong[0]['gpus']} GPUs, not "
                    f"{cluster.gpus_per_node}; start it with the command above"
                )
            working = [node for node in nodes if node["gpus"] == cluster.gpus_per_node]
            if len(working) > cluster.nodes:
                raise LaunchError(f"{len(working)} nodes joined, {cluster.nodes} are configured")
            return len(working) == cluster.nodes

        await self._until(joined, cluster.nodes_timeout_s, f"{cluster.nodes} nodes", self._ray)

    async def _submit(self) -> None:
        """Ray accepts jobs a little later than nodes; until then the command fails at once."""
        self._say(f"submitting the job; log {self._job.log}")
        for _ in range(SUBMIT_ATTEMPTS):
            await self._job.start()
            ended = asyncio.create_task(self._job.wait())
            done, _pending = await asyncio.wait([ended], timeout=10.0)
            if not done:
                ended.cancel()
                return
            if NO_AGENT not in self._job.log.read_bytes()[-4000:]:
                raise self._job.failure("ended at once")
            self._job.log.write_bytes(b"")
        raise self._job.failure("was never accepted; is cluster.ray.agent_port free on this node")

    async def _engines(self) -> dict[str, str]:
        """Addresses of all routers, once engines answer behind each of them."""
        path, wait_s = self._plan.paths.engines, self._plan.cluster.engines_timeout_s
        started = time.monotonic()

        async def written() -> bool:
            return path.is_file()

        self._say("waiting for the engines (minutes: weights are loaded and converted)")
        await self._until(written, wait_s, str(path), self._ray, self._job)
        addresses: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        left = wait_s - (time.monotonic() - started)
        for name, url in addresses.items():
            await self._until(answers(f"{url}/health_generate"), left, url, self._ray, self._job)
            self._say(f"{name} engines answer at {url}")
        # Until the trainer has sent its weights, the engines serve the start weights under a name
        # that no turn could be trained with.
        self._say("waiting for the trainer to send its weights")
        sent = has_version(addresses["policy"], self._start_version + 1)
        left = wait_s - (time.monotonic() - started)
        await self._until(sent, left, "weights of the trainer", self._ray, self._job)
        return addresses

    async def _start_children(self, words: list[str]) -> None:
        proxy, commands = self._plan.config.proxy, self._plan.commands
        timeout_s = self._plan.cluster.proxy_timeout_s
        await start_endpoint(self._children, proxy, [*commands.proxy, *words], timeout_s)
        await self._children.start("judge", [*commands.judge, *words], _at_once, 60)
        self._say(f"ready: point an OpenAI client at http://{proxy.host}:{proxy.port}/v1")

    async def _follow(self) -> None:
        """A line now and then until the job ends; raises if anything else ends first."""
        job = asyncio.create_task(self._job.wait())
        ray = asyncio.create_task(self._ray.wait())
        watched: set[asyncio.Future[object]] = {job, ray, self._children.failed}  # type: ignore[arg-type]
        try:
            while not any(future.done() for future in watched):
                self._say(await status_line(self._store))
                await self._write_steps()
                await asyncio.wait(
                    watched, timeout=STATUS_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            job.cancel()
            ray.cancel()
        if self._children.failed.done():
            self._children.failed.result()
        if self._job.status is None:
            raise self._ray.failure("ended while the job was running")
        if self._job.status != 0:
            raise self._job.failure(f"ended with status {self._job.status}")
        self._say("the job is done")

    async def _write_steps(self, *, is_end: bool = False) -> None:
        """What slime has reported goes into metrics.jsonl; its warnings are said. A full disk does
        not end the job.
        """
        try:
            rows = await asyncio.to_thread(self._steps.update, is_end=is_end)
        except OSError as error:
            self._say(f"metrics.jsonl is behind: {error}")
            return
        for line in said_warnings([row for row in rows if row["time"] >= self._started_at]):
            self._say(f"warning: {line}")

    async def _report(self) -> None:
        """RUN/report.html, if anything was trained."""
        await self._write_steps(is_end=True)
        config, run = self._plan.config, self._plan.paths.run
        if not metric_rows(run):
            return
        try:
            rendering = await asyncio.to_thread(Rendering.load, config.model, config.renderer)
            title = f"Training {config.model}"
            path = await write_run_report(run, title, self._store, rendering)
        except (OSError, ValueError, StoreError) as error:
            self._say(f"no report: {error}")
        else:
            self._say(f"report: {path}")

    async def _until(
        self, ready: Callable[[], Awaitable[bool]], timeout_s: float, what: str, *needed: Held
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not await ready():
            for held in needed:
                if held.status is not None:
                    raise held.failure(f"ended (status {held.status}) before {what} was there")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{what}: not there after {timeout_s:.0f} s; logs are in "
                    f"{self._plan.paths.launch}"
                )
            await asyncio.sleep(POLL_S)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _write(plan: LaunchPlan, start_version: int) -> None:
    """Write everything that a launch puts in the run folder before it starts anything."""
    custom = {plan.paths.custom_yaml: custom_file(plan.paths, plan.config.trainer, start_version)}
    paths = plan.paths
    paths.launch.mkdir(mode=0o700, parents=True)
    run_config.save(plan.config, paths.config)
    for path, text in {**plan.files, **custom}.items():
        path.write_text(text, encoding="utf-8")
    if not paths.ray_token.exists():
        paths.ray_token.touch(mode=0o600)
        paths.ray_token.write_text(secrets.token_hex(32), encoding="utf-8")
    # Addresses of an earlier launch would send the endpoint to engines that are gone.
    paths.engines.unlink(missing_ok=True)


def has_version(url: str, at_least: int) -> Callable[[], Awaitable[bool]]:
    """Whether the engines behind `url` serve weights with that number or a later one."""

    async def ready() -> bool:
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{url}/get_model_info") as reply,
            ):
                found = (await reply.json(content_type=None)).get("weight_version")
        except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError):
            return False
        return isinstance(found, str) and found.isdecimal() and int(found) >= at_least

    return ready


async def _at_once() -> bool:
    return True
