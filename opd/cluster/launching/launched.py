"""A launch on a cluster: carries a plan out, follows the job, and stops what it started.

    Ray's head -> the other nodes join -> the job -> RUN/engines.json -> endpoint, judge worker
                                           ^-- again, if the run goes back to an older version --v

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
from pathlib import Path

import aiohttp
from rich.console import Console

from opd.cluster.files import custom_file
from opd.cluster.going_back import going_back, newest_chain, set_aside, wanted_version
from opd.cluster.launching.held import Held, LaunchError, run_to_end
from opd.cluster.plan import LaunchPlan, engine_overrides, plan_again
from opd.cluster.show import draw, wrap
from opd.commands.keys import refuse_open_door
from opd.processes.answering import answers
from opd.processes.roles.proxy_workers import start_endpoint
from opd.processes.serving import until_stopped
from opd.processes.supervisor import Supervisor
from opd.report.cluster_steps import ClusterSteps
from opd.report.curves import metric_rows
from opd.report.health import said_warnings
from opd.report.run_report import write_run_report
from opd.report.terminal.held import held_line
from opd.report.terminal.status import status_line
from opd.run import config as run_config
from records.database.private_files import private_folder
from records.errors import StoreError, StoreUnavailable
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.slime.handovers import weight_start_version
from rollout_bridge.stop_order import serve_newest, why_stopped
from trainer.errors import StartupError
from trainer.schedule.rollback_order import order_rollback, remove_rollback

STATUS_EVERY_S = 60.0
POLL_S = 2.0
NO_AGENT = b"No available agent"
SUBMIT_ATTEMPTS = 10
STOP_JOB_S = 120.0
REST_S = 600.0
"""How long a job that is to end may take for the step that it is at."""


def carry_out(plan: LaunchPlan) -> None:
    """Start what the plan says, and follow the job until it or the user ends it."""
    asyncio.run(_launch(plan))


async def _launch(plan: LaunchPlan) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console()
    back = [] if plan.back is None else plan.back.said()
    for line in (plan.flags.text, *plan.warnings, draw(plan.layout), *back):
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
    """The processes of a launch. A rollback ends the job, and starts a new one on the same Ray."""

    def __init__(self, plan: LaunchPlan, store: Store, console: Console, start_version: int):
        self._store = store
        self._console = console
        self._ray = Held("Ray", plan.commands.ray_head, plan.paths.launch / "ray.log")
        self._steps = ClusterSteps(plan.paths.run)
        self._started_at = time.time()
        self._take(plan, start_version)

    def _take(self, plan: LaunchPlan, start_version: int) -> None:
        """The next job is that of `plan`, whose files are written."""
        self._plan = plan
        self._start_version = start_version
        logs = plan.paths.launch
        self._job = Held("slime's job", plan.commands.submit, logs / "slime.log")
        self._children = Supervisor(logs)

    async def run(self) -> None:
        """Start all, follow jobs to the end of the last one, stop all. Raises for anything that
        ends early.
        """
        submitted = False
        try:
            await self._start_ray()
            while True:
                submitted = True
                await self._submit()
                addresses = await self._engines()
                self._went_back()
                await self._start_children(engine_overrides(self._plan.config, addresses))
                if await self._follow(addresses["policy"]):
                    return
                await self._stop_job()
                await self._plan_again()
        finally:
            await self._children.stop("proxy")
            if submitted and self._job.status is None:
                self._say("stopping the job")
                await run_to_end(self._plan.commands.stop_job, STOP_JOB_S)
            await self._children.stop()
            await self._job.stop()
            await self._ray.stop()
            await self._report()

    async def _stop_job(self) -> None:
        """End a job whose run goes back, and what uses its engines. Raises LaunchError if it may
        still be running: two jobs must not work on one store.
        """
        await self._children.stop()
        if self._job.status is None:
            status, _ = await run_to_end(self._plan.commands.stop_job, STOP_JOB_S)
            if status != 0:
                raise LaunchError(
                    f"slime's job could not be stopped (status {status} of the command, 124: it "
                    f"took over {STOP_JOB_S:.0f} s); the next launch goes back"
                )
        await self._job.stop()
        await self._write_steps(is_end=True)

    async def _plan_again(self) -> None:
        """The next job. Raises StartupError."""
        plan = await asyncio.to_thread(plan_again, self._plan)
        start_version = await weight_start_version(self._store, plan.paths.run)
        _write(plan, start_version)
        for line in [] if plan.back is None else plan.back.said():
            self._say(line)
        self._take(plan, start_version)

    def _went_back(self) -> None:
        """The engines serve the weights of this job: an order to go back was followed. RUN/stop
        stays, without the version that it wanted served.
        """
        run = self._plan.paths.run
        wanted, back = wanted_version(run), self._plan.back
        if wanted is None or (back is not None and wanted != back.wanted):
            return  # nothing was ordered, or by now something else
        serve_newest(run)
        remove_rollback(run)
        if back is not None:
            self._say(f"version {self._start_version + 1} is served: it restores {back.where}")
        if (why := why_stopped(run)) is not None:
            self._say(f"training stays stopped: {why}; opd policy resume --run {run} resumes it")

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

    async def _follow(self, policy: str) -> bool:
        """A line now and then until the job ends (True), or is to end because the run goes back
        (False); raises if anything else ends first. `policy` is where its engines answer.
        """
        job = asyncio.create_task(self._job.wait())
        ray = asyncio.create_task(self._ray.wait())
        back = asyncio.create_task(self._ordered_back(policy))
        watched: set[asyncio.Future[object]] = {job, ray, back, self._children.failed}  # type: ignore[arg-type]
        try:
            while not any(future.done() for future in watched):
                self._say(await status_line(self._store))
                await self._write_steps()
                if (held := held_line(self._plan.paths.run)) is not None:
                    self._say(held)
                await asyncio.wait(
                    watched, timeout=STATUS_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for task in (job, ray, back):
                task.cancel()
        if self._children.failed.done():
            self._children.failed.result()
        if back.done():
            back.result()
            return False
        if self._job.status is None:
            raise self._ray.failure("ended while the job was running")
        if self._job.status != 0:
            raise self._job.failure(f"ended with status {self._job.status}")
        self._say("the job is done")
        return True

    async def _ordered_back(self, policy: str) -> None:
        """Return once an order to go back can be followed: what the job was given is served, or
        does not become so in time. The order then says which version was served last.
        """
        run = self._plan.paths.run
        while True:
            await asyncio.sleep(POLL_S)
            try:
                back = await asyncio.to_thread(going_back, run)
            except StartupError as error:
                self._refuse(str(error))
                continue
            if back is None:
                if wanted_version(run) is not None:
                    self._refuse(f"version {wanted_version(run)} is served already")
                continue
            break
        self._say(
            f"version {back.wanted} was ordered back: the job ends after its step, and starts "
            "again; meanwhile the endpoint does not answer"
        )
        deadline = time.monotonic() + REST_S
        served = await _version_at(policy)
        while not await asyncio.to_thread(_is_at_rest, run, served) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            served = await _version_at(policy) or served
        order_rollback(run, back.wanted, served=served)

    def _refuse(self, why: str) -> None:
        """Take back an order that cannot be followed, and go on."""
        self._say(f"no rollback: {why}")
        serve_newest(self._plan.paths.run)
        remove_rollback(self._plan.paths.run)

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
    """Write everything that a launch puts in the run folder before it starts anything, and set
    aside what it does not load.
    """
    paths = plan.paths
    trainer, back = plan.config.trainer, plan.back
    custom = {paths.custom_yaml: custom_file(paths, trainer, start_version, back)}
    if back is not None:
        set_aside(back, paths, start_version + 1)
    paths.launch.mkdir(mode=0o700, parents=True)
    run_config.save(plan.config, paths.config)
    for path, text in {**plan.files, **custom}.items():
        path.write_text(text, encoding="utf-8")
    if not paths.ray_token.exists():
        paths.ray_token.touch(mode=0o600)
        paths.ray_token.write_text(secrets.token_hex(32), encoding="utf-8")
    # Addresses of an earlier launch would send the endpoint to engines that are gone.
    paths.engines.unlink(missing_ok=True)


async def _version_at(url: str) -> int | None:
    """The number of the weights that the engines behind `url` serve; None: they do not say."""
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/get_model_info") as reply,
        ):
            found = (await reply.json(content_type=None)).get("weight_version")
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError):
        return None
    return int(found) if isinstance(found, str) and found.isdecimal() else None


def _is_at_rest(run: Path, served: int | None) -> bool:
    """Whether the engines serve all that the job was given samples for."""
    given = [one.version for one in newest_chain(run) if one.has_samples]
    return served is not None and served >= max(given, default=0)


def has_version(url: str, at_least: int) -> Callable[[], Awaitable[bool]]:
    """Whether the engines behind `url` serve weights with that number or a later one."""

    async def ready() -> bool:
        version = await _version_at(url)
        return version is not None and version >= at_least

    return ready


async def _at_once() -> bool:
    return True
