"""The proxy as a process to be attacked, with a heart that is listened to.

    python -m tests.reliability.attack_server FOLDER [SETTINGS AS JSON]

Prints its port. `GET /test/heart` says how late a task came that wanted to run every 10 ms, how
much CPU time the loop and the threads of redaction used from one time to the next, and how much
the longest callback of the event loop took, since it was last asked. The engine is scripted; the
rest is what `serve` starts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from asyncio import events
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from api_proxy.server.event_loop import run
from api_proxy.server.server import ProxyServer
from records.config import StoreConfig
from records.store import Store
from records.types import Ids
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.reliability.lab import MODEL

CONTEXT_LENGTH = 131_072
_BEAT_S = 0.01


class Short(ScriptedEngine):
    """Answers everything with one sentence, or with a long text if `user` asks for 4,000 tokens."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(context_length=CONTEXT_LENGTH)
        self._words = rendering.tokenizer.encode("It is 21 degrees.", add_special_tokens=False)
        self._end = rendering.stop_token_ids[0]

    def next_line(self, input_ids: Ids, params: SamplingParams) -> Line:
        """The sentence once, or again and again."""
        assert len(np.asarray(input_ids)) < CONTEXT_LENGTH
        ids = self._words
        if params.max_new_tokens == 4_000:
            ids = (ids * 4_000)[:3_999]
        return Line(ids=[*ids, self._end], chunk=1)


class Heart:
    """Listens to the event loop that it is made in."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._cpu_s: list[float] = []
        self._longest_s = 0.0
        self._longest = ""
        self._task = asyncio.create_task(self._beat())
        run = events.Handle._run

        def timed(handle: events.Handle) -> None:
            begun = time.thread_time()
            run(handle)
            passed_s = time.thread_time() - begun
            if passed_s > self._longest_s:
                self._longest_s, self._longest = passed_s, repr(handle)[:300]

        events.Handle._run = timed  # type: ignore[method-assign]

    async def _beat(self) -> None:
        while True:
            due, cpu_s = time.perf_counter() + _BEAT_S, _interpreter_s()
            await asyncio.sleep(_BEAT_S)
            self._late_s.append(time.perf_counter() - due)
            self._cpu_s.append(_interpreter_s() - cpu_s)

    def report(self) -> dict[str, Any]:
        """What was heard since the last time."""
        late_s, cpu_s = np.asarray(self._late_s or [0.0]), np.asarray(self._cpu_s or [0.0])
        told = {
            "beats": len(self._late_s),
            "late_p999_s": float(np.quantile(late_s, 0.999)),
            "late_max_s": float(late_s.max()),
            "beat_cpu_p999_s": float(np.quantile(cpu_s, 0.999)),
            "callback_cpu_s": self._longest_s,
            "callback": self._longest,
            "process_cpu_s": time.process_time(),
        }
        self._late_s.clear()
        self._cpu_s.clear()
        self._longest_s, self._longest = 0.0, ""
        return told


def _interpreter_s() -> float:
    """CPU time of the loop's thread, and of those that hold the interpreter all the time."""
    own = threading.current_thread()
    threads = [one for one in threading.enumerate() if one.name.startswith("redaction")]
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(one.ident))
        for one in (own, *threads)
        if one.ident is not None
    )


async def serve(folder: Path, settings: dict[str, Any]) -> None:
    """Serve until a signal."""
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    async with await Store.open(StoreConfig.sqlite(folder / "records.db")) as store:
        config = ProxyConfig(port=0, **settings)
        deps = ProxyDeps(store=store, engine=Short(rendering), rendering=rendering, config=config)
        app = create_app(deps)
        heart = Heart()
        _add_heart(app, heart)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        print(listener.getsockname()[1], flush=True)
        await ProxyServer(app, config).serve(sockets=[listener])


def _add_heart(app: FastAPI, heart: Heart) -> None:
    @app.get("/test/heart")
    async def report() -> dict[str, Any]:
        return heart.report()


if __name__ == "__main__":
    run(serve(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
