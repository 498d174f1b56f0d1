"""What is fuzzed: the real application over a real store, served as it is deployed.

Behind it stands an engine that answers anything.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from api_proxy.pages import now
from api_proxy.server.connections import protocol_of
from api_proxy.server.event_loop import run as run_loop
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The application in a thread of its own: its routes, its engine, and keys for it."""

    url: str
    database: StoreConfig
    routes: set[tuple[str, str]]
    engine: AnyReply
    keys: FuzzKeys | None


@contextlib.contextmanager
def served(database: StoreConfig, with_keys: bool = False) -> Iterator[Served]:
    """Serve on a free port until the body ends; then everything is committed. `with_keys`: who
    has none is refused.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    ready: Any = threading.Event()
    stop: list[uvicorn.Server] = []
    routes: set[tuple[str, str]] = set()
    failure: list[BaseException] = []
    engine = AnyReply(rendering)
    keys: list[FuzzKeys] = []
    now.STREAM_S = 0.1  # else each request for events takes a minute

    async def serve() -> None:
        async with await Store.open(database) as store:
            if with_keys:
                keys.append(await make_keys(store))
            deps = ProxyDeps(
                store=store,
                engine=engine,
                rendering=rendering,
                config=CONFIG,
            )
            app = create_app(deps)
            routes.update(routes_of(app))
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    http=protocol_of(CONFIG, app.state.service.metrics.refusals),
                    log_level="critical",
                    access_log=False,
                )
            )
            stop.append(server)
            ready.set()
            await server.serve(sockets=[listener])

    def run() -> None:
        try:
            run_loop(serve())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        if not failure:
            yield Served(
                url=f"http://127.0.0.1:{listener.getsockname()[1]}",
                database=database,
                routes=routes,
                engine=engine,
                keys=keys[0] if keys else None,
            )
    finally:
        for server in stop:
            server.should_exit = True
        thread.join()
        listener.close()
    if failure:
        raise failure[0]
