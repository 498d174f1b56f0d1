"""What is fuzzed: the real application over a real store, served as it is deployed.

Behind it stands an engine that answers anything.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import uvicorn

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from api_proxy.pages import now
from api_proxy.server.connections import protocol_of
from api_proxy.server.event_loop import run as run_loop
from api_proxy.sharing.sharing import Sharing
from records.config import StoreConfig
from records.store import Store
from records.types import Ids
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.reliability.fuzz_keys import FuzzKeys, make_keys
from tests.reliability.lab import MODEL
from tests.routes import routes_of

CONFIG = ProxyConfig(
    usage_flush_s=0.5,
    # Low enough to be met now and then by what is made up.
    max_tools=3,
    max_parts=4,
    max_tool_calls=2,
    max_json_values=150,
    max_json_depth=12,
    max_schema_bytes=1024,
)
_REPLIES = (
    "It is 21 degrees.",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Karo"}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"ci',
    "<think>\nhm\n</think>\n\nYes. é",
    "",
)


class AnyReply(ScriptedEngine):
    """Answers everything, without a script."""

    @classmethod
    def load(cls) -> AnyReply:
        """For the lab's model."""
        renderer = RendererConfig(name="qwen3", enable_thinking=False)
        return cls(Rendering.load(str(MODEL), renderer))

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(context_length=4096)
        self.rendering = rendering
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The application in a thread of its own: its routes, its engine, and keys for it."""

    url: str
    database: StoreConfig
    routes: set[tuple[str, str]]
    engine: AnyReply
    keys: FuzzKeys | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process of the endpoint, over a store of its own."""

    database: StoreConfig
    listener: socket.socket
    sharing: Sharing

    async def serve(
        self, engine: AnyReply, with_keys: bool, begun: Callable[[Begun], None] = lambda _: None
    ) -> None:
        """Until it is told to stop."""
        async with await Store.open(self.database) as store:
            keys = await make_keys(store) if with_keys else None
            deps = ProxyDeps(
                store=store,
                engine=engine,
                rendering=engine.rendering,
                config=CONFIG,
                sharing=self.sharing,
            )
            app = create_app(deps)
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    http=protocol_of(CONFIG, app.state.service.metrics.refusals),
                    log_level="critical",
                    access_log=False,
                )
            )
            begun(Begun(server=server, routes=set(routes_of(app)), keys=keys))
            await server.serve(sockets=[self.listener])


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A part that is about to serve."""

    server: uvicorn.Server
    routes: set[tuple[str, str]]
    keys: FuzzKeys | None


def _be_worker(part: Part, descriptor: int, number: int, workers: int) -> None:
    """A process of its own, which SIGTERM ends."""
    part = replace(part, sharing=Sharing.join(descriptor, number, workers))
    run_loop(part.serve(AnyReply.load(), with_keys=False))


@contextlib.contextmanager
def served(database: StoreConfig, with_keys: bool = False, workers: int = 1) -> Iterator[Served]:
    """Serve on a free port until the body ends; then everything is committed. `with_keys`: who
    has none is refused. `workers` processes accept connections, one of them this one.
    """
    now.STREAM_S = 0.1  # else each request for events takes a minute
    listener = socket.create_server(("127.0.0.1", 0))
    sharing = Sharing.alone() if workers == 1 else Sharing.create(workers)
    own = Part(database=database, listener=listener, sharing=sharing)
    others = []
    if workers > 1:
        memory = sharing.descriptor
        fork = multiprocessing.get_context("fork")
        others = [
            fork.Process(target=_be_worker, args=(own, memory, number, workers))
            for number in range(2, workers + 1)
        ]
        for other in others:
            other.start()
        own = replace(own, sharing=Sharing.join(memory, 1, workers))
    engine = AnyReply.load()
    ready: Any = threading.Event()
    found: list[Begun] = []
    failure: list[BaseException] = []

    def begun(one: Begun) -> None:
        found.append(one)
        ready.set()

    def run() -> None:
        try:
            run_loop(own.serve(engine, with_keys, begun))
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        if found:
            yield Served(
                url=f"http://127.0.0.1:{listener.getsockname()[1]}",
                database=database,
                routes=found[0].routes,
                engine=engine,
                keys=found[0].keys,
            )
    finally:
        for one in found:
            one.server.should_exit = True
        thread.join()
        for other in others:
            other.terminate()
            other.join()
        listener.close()
    if failure:
        raise failure[0]
    # uvicorn ends in order, and then by the signal that told it to.
    codes = {other.exitcode for other in others}
    assert codes <= {-signal.SIGTERM}, f"workers ended with {codes}"
