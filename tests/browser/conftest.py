"""A short run of the tool lab, served again behind keys, and a browser that looks at its pages.

Everything is real: the lab's command, the run's processes, its store, and Debian's Chromium.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from playwright import sync_api as playwright

from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from records.keys import Keys
from records.store import Store

CHROMIUM = shutil.which("chromium")
ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the browser, say so."""
    if CHROMIUM is None:
        mark = pytest.mark.skip(reason="no Chromium here: apt-get install chromium")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An endpoint of a run that has learned; `keys` by tenant, of which `admin` sees all."""

    url: str
    folder: Path
    keys: dict[str, str]

    def read(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        """What the run's store says."""

        async def asked() -> T:
            config = run_config.load(self.folder / "config.toml")
            async with await Store.open(config.store) as store:
                return await ask(store)

        # The browser's own loop runs in this thread.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(asked())).result()


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the lab that took a few steps; some hints wait for a person."""
    folder = tmp_path_factory.mktemp("runs") / "lab"
    command = [sys.executable, "-m", "examples.tool_lab", "--run", str(folder)]
    command += ["--updates", "3", "--eval-samples", "16", "--max-seconds", "360"]
    command += ["--set", "judge.review=sampled", "--set", "judge.review_share=0.3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    other = folder.parent / "other"
    other.mkdir()
    shutil.copy(folder / "metrics.jsonl", other)
    return folder


@pytest.fixture(scope="session")
def served(learned: Path) -> Iterator[Served]:
    """The run's engine, which is also the teacher, and its endpoint."""
    port = free_ports(1)[0]
    keys = {name: _key(learned, name) for name in ("admin", "acme")}
    commands = {
        "engine": ["engine", "--role", "policy"],
        "proxy": ["proxy", "--set", f"proxy.port={port}"],
    }
    with ExitStack() as stack:
        for name, words in commands.items():
            log = learned.parent / f"{name}.log"
            command = [sys.executable, "-m", "opd.cli.app", *words, "--run", str(learned)]
            process = stack.enter_context(_running(command, log))
            if name == "engine":
                engine = run_config.load(learned / "config.toml").policy.base_url
                _wait_for(f"{engine}/health", process, log)
            else:
                _wait_for(f"http://127.0.0.1:{port}/readyz", process, log)
        yield Served(url=f"http://127.0.0.1:{port}", folder=learned, keys=keys)


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=120)


def _key(folder: Path, tenant: str) -> str:
    async def made() -> str:
        config = run_config.load(folder / "config.toml")
        async with await Store.open(config.store) as store:
            _, secret = await Keys(store, time.time).create(
                actor="test", tenant=tenant, is_admin=tenant == "admin"
            )
            return secret

    return asyncio.run(made())


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="session")
def browser() -> Iterator[playwright.Browser]:
    """Chromium without a window."""
    with playwright.sync_playwright() as running:
        # Without its sandbox, which a container's root user does not get.
        one = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


class Looker:
    """A browser's tab that is logged in, and everything that went wrong in it."""

    def __init__(self, context: playwright.BrowserContext, url: str) -> None:
        self.page = context.new_page()
        self.url = url
        self.problems: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("response", self._on_response)

    def open(self, path: str) -> playwright.Page:
        """The page at `path`."""
        self.page.goto(self.url + path, wait_until="load")
        return self.page

    def _on_console(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _on_request(self, request: playwright.Request) -> None:
        if not request.url.startswith(f"{self.url}/ui"):
            self.problems.append(f"request of another address: {request.url}")

    def _on_response(self, response: playwright.Response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")


@pytest.fixture
def looking(served: Served, browser: playwright.Browser) -> Iterator[Callable[..., Looker]]:
    """Opens a tab for a tenant; in the end nothing may have gone wrong in any."""
    contexts, tabs = [], []

    def opened(tenant: str = "admin", **options: object) -> Looker:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        one = Looker(context, served.url)
        tabs.append(one)
        page = one.open("/ui/login")
        page.get_by_label("API key").fill(served.keys[tenant])
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/ui/now")
        # The form itself comes with 401.
        one.problems = [
            problem for problem in one.problems if "401" not in problem and "favicon" not in problem
        ]
        return one

    yield opened
    for context in contexts:
        context.close()
    assert [problem for one in tabs for problem in one.problems] == []


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """Where the documentation's pictures go; None: none are taken."""
    folder = request.config.getoption("--pictures")
    return None if folder is None else Path(folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--pictures FOLDER`: take those of the documentation."""
    parser.addoption("--pictures", metavar="FOLDER", help="take its screenshots anew")


def axe_source() -> str:
    """The script of axe-core."""
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


def serious(page: playwright.Page) -> list[str]:
    """What axe-core finds that keeps people out."""
    page.evaluate(axe_source())
    found = page.evaluate("axe.run()")
    return [
        f"{one['impact']}: {one['id']}: {json.dumps([node['html'] for node in one['nodes']])[:300]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
