"""Sends the endpoint whatever its schemas allow and more: no 5xx, no hang, nothing unrecorded.

    python -m tests.reliability.fuzz --requests 20000

The real application over a real store, served as it is deployed; behind it an engine that answers
anything with texts, calls and broken ids in turn. After the last request every answered turn must
be in the store, and the store must be sound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.progress import Progress

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from records.config import StoreConfig
from records.store import Store
from records.types import Ids
from records.verify import verify_database
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.reliability.fuzz_requests import ROUTES, FuzzRequest, requests
from tests.reliability.lab import MODEL

HANG_S = 120.0
"""A request that has no answer after so long hangs. Generous: the machine may be busy."""
_REPLIES = (
    "It is 21 degrees.",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Karo"}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"ci',
    "<think>\nhm\n</think>\n\nYes. é",
    "",
)


class AnyReply(ScriptedEngine):
    """Answers everything, without a script."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(context_length=4096)
        encode = rendering.tokenizer.encode
        end = rendering.stop_token_ids[0]
        self._ids = [[*encode(text, add_special_tokens=False), end] for text in _REPLIES]
        self._rng = random.Random(0)
        self._vocab_size = rendering.vocab_size

    def next_line(self, input_ids: Ids, params: SamplingParams) -> Line:
        """One of the replies, or ids that mean nothing; cut at the budget."""
        assert np.asarray(input_ids).size + params.max_new_tokens <= 4096
        ids = self._rng.choice(self._ids)
        if self._rng.random() < 0.2:
            ids = [self._rng.randrange(self._vocab_size) for _ in range(6)]
        budget = params.max_new_tokens
        reason = "stop" if len(ids) <= budget else "length"
        return Line(ids=ids[:budget], chunk=self._rng.choice([1, 3]), finish_reason=reason)


@dataclass
class Served:
    """The application in a thread of its own, with its store."""

    url: str
    routes: set[tuple[str, str]]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Serve on a free port until the body ends; then everything is committed."""
    listener = socket.create_server(("127.0.0.1", 0))
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    ready: Any = threading.Event()
    stop: list[uvicorn.Server] = []
    routes: set[tuple[str, str]] = set()
    failure: list[BaseException] = []

    async def serve() -> None:
        async with await Store.open(StoreConfig.sqlite(folder / "records.db")) as store:
            deps = ProxyDeps(
                store=store,
                engine=AnyReply(rendering),
                rendering=rendering,
                config=ProxyConfig(),
            )
            app = create_app(deps)
            for route in app.routes:
                for method in getattr(route, "methods", None) or ():
                    routes.add((method, getattr(route, "path", "")))
            server = uvicorn.Server(
                uvicorn.Config(app, http="httptools", log_level="critical", access_log=False)
            )
            stop.append(server)
            ready.set()
            await server.serve(sockets=[listener])

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        if not failure:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", routes)
    finally:
        for server in stop:
            server.should_exit = True
        thread.join()
        listener.close()
    if failure:
        raise failure[0]


@dataclass
class Outcome:
    """What was answered, and what should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    turn_ids: set[str] = field(default_factory=set)
    response_ids: list[str] = field(default_factory=list)

    def note(self, request: FuzzRequest, response: httpx.Response) -> None:
        """Look at one answer."""
        self.statuses[response.status_code] += 1
        if response.status_code >= 500:
            self.problem(request, f"{response.status_code} {response.text[:300]}")
        elif response.status_code >= 400 and request.path.startswith("/v1/"):
            self._check_refusal(request, response)
        if response.status_code == 200 and "x-turn-id" in response.headers:
            self._check_answer(request, response)

    def problem(self, request: FuzzRequest, what: str) -> None:
        """Keep what is needed to send it again."""
        sent = f"{request.method} {request.path} {request.headers} {request.query} "
        self.problems.append(f"{what}\n  {sent}{request.body[:2000]!r}")

    def _check_refusal(self, request: FuzzRequest, response: httpx.Response) -> None:
        if request.method == "HEAD":
            return
        try:
            is_worded = bool(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            is_worded = False
        if not is_worded:
            self.problem(request, f"{response.status_code} without words: {response.text[:300]}")

    def _check_answer(self, request: FuzzRequest, response: httpx.Response) -> None:
        self.turn_ids.add(response.headers["x-turn-id"])
        if response.headers["content-type"].startswith("text/event-stream"):
            if "error" in response.text.rpartition("data: ")[2]:
                self.problem(request, f"a stream ended in an error: {response.text[-300:]}")
            return
        self.response_ids.append(str(response.json().get("id")))
        del self.response_ids[:-200]


def fuzz(folder: Path, number: int, start: int, tell: Callable[[], None]) -> Outcome:
    """Send `number` requests, the same for the same `start`."""
    outcome = Outcome()
    with served(folder) as app, httpx.Client(base_url=app.url, timeout=HANG_S) as client:
        unknown = {route for route in app.routes if route[0] != "HEAD"} - {
            (route.method, route.path) for route in ROUTES
        }
        if unknown:
            outcome.problems.append(f"routes that are not fuzzed: {sorted(unknown)}")

        @seed(start)
        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(requests())
        def send(request: FuzzRequest) -> None:
            _send(client, request, outcome)
            tell()

        send()
        ready = client.get("/readyz")
        if ready.status_code != 200:
            outcome.problems.append(f"not ready afterwards: {ready.text}")
    outcome.problems += asyncio.run(_records_problems(folder, outcome))
    return outcome


def _send(client: httpx.Client, request: FuzzRequest, outcome: Outcome) -> None:
    known = outcome.response_ids or ["resp_unknown"]
    chosen = known[request.earlier % len(known)]
    path = request.path.replace("{response_id}", chosen)
    headers = {name: value.strip() for name, value in request.headers.items()}
    try:
        prepared = client.build_request(
            request.method,
            httpx.URL(client.base_url.join("/"), path=path, params=request.query or None),
            content=request.body.replace(b"{response_id}", chosen.encode()),
            headers=[
                (name.encode(), value.encode("latin-1"))
                for name, value in {"content-type": "application/json", **headers}.items()
            ],
        )
    except (httpx.InvalidURL, UnicodeError):
        return  # no client could send it
    try:
        response = client.send(prepared)
    except httpx.LocalProtocolError:
        return  # likewise
    except httpx.TimeoutException:
        outcome.problem(request, f"no answer within {HANG_S:.0f} s")
    except httpx.TransportError as error:
        outcome.problem(request, f"{type(error).__name__}: {error}")
    else:
        outcome.note(request, response)


async def _records_problems(folder: Path, outcome: Outcome) -> list[str]:
    """Answered turns that are not in the store, and what is wrong with the store."""
    config = StoreConfig.sqlite(folder / "records.db")
    async with await Store.open(config) as store:
        stored = {turn.turn_id for turn in await store.list_turns(limit=10_000_000)}
    problems = await verify_database(config)
    lost = sorted(outcome.turn_ids - stored)
    return [*(f"answered and not recorded: turn {one}" for one in lost), *problems]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Send the endpoint anything.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        task = progress.add_task("requests", total=options.requests)
        outcome = fuzz(Path(folder), options.requests, options.seed, lambda: progress.advance(task))
    for problem in outcome.problems:
        print(problem)
    shown = ", ".join(f"{status}: {count}" for status, count in sorted(outcome.statuses.items()))
    print(f"{sum(outcome.statuses.values())} answers ({shown}); {len(outcome.problems)} problems")
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
