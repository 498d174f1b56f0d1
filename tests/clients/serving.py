"""The endpoint on a port, as one worker or several: `./run.sh clients --workers N`.

Workers are applications of one process here, each over a store of its own, with the memory that
real ones share; every request goes to another one than the request before.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from api_proxy.app import ProxyDeps, create_app
from api_proxy.sharing.sharing import Sharing
from records.config import StoreConfig
from records.store import Store

WORKERS = "OPD_CLIENT_WORKERS"


@asynccontextmanager
async def serving(deps: ProxyDeps, store: StoreConfig) -> AsyncIterator[str]:
    """The URL of an endpoint of `deps`, whose store is at `store`."""
    number = int(os.environ.get(WORKERS, "1"))
    async with AsyncExitStack() as opened:
        apps = [create_app(deps)]
        if number > 1:
            memory = Sharing.create(number).descriptor
            apps = [create_app(replace(deps, sharing=Sharing.join(memory, 1, number)))]
            for worker in range(2, number + 1):
                own = await opened.enter_async_context(await Store.open(store))
                sharing = Sharing.join(memory, worker, number)
                app = create_app(replace(deps, store=own, sharing=sharing))
                await opened.enter_async_context(app.router.lifespan_context(app))
                apps.append(app)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(_Wandering(apps), log_level="warning"))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


class _Wandering:
    """Requests go to one application after the other; uvicorn starts and ends the first."""

    def __init__(self, apps: list[FastAPI]) -> None:
        self._first = apps[0]
        self._next = itertools.cycle(apps)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self._first if scope["type"] == "lifespan" else next(self._next)
        await app(scope, receive, send)
