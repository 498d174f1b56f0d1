"""A server that answers each route with what a test wants, to inject what no real one can be made
to do on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

NO_WORKERS = {
    "error": {
        "type": "Service Unavailable",
        "code": "no_available_workers",
        "message": "No available workers (all circuits open or unhealthy)",
    }
}
"""What SGLang's router 0.3.2 answers to /generate, with 503, while it has no worker."""
ROUTER_WITHOUT_WORKERS: dict[str, tuple[int, Any]] = {
    "/health": (200, "OK"),
    "/get_server_info": (200, {"router_manager": True, "routers_count": 1, "workers_count": 0}),
    "/get_model_info": (
        503,
        {
            "error": {
                "type": "Service Unavailable",
                "code": "no_workers",
                "message": "No workers are available",
            }
        },
    ),
    "/v1/models": (503, "No models available"),
    "/generate": (503, NO_WORKERS),
}


@dataclass
class FaultyServer:
    """Where it listens, what it answers (changeable), and how often each route was asked."""

    url: str
    replies: dict[str, tuple[int, Any]]
    asked: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def faulty_server(replies: Mapping[str, tuple[int, Any]]) -> AsyncIterator[FaultyServer]:
    """Route -> (status, JSON value, or text); every other route is 404 with an empty body."""

    async def answer(request: web.Request) -> web.Response:
        server.asked[request.path] += 1
        status, body = server.replies.get(request.path, (404, ""))
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server = FaultyServer(url=f"http://{host}:{port}", replies=dict(replies))
    try:
        yield server
    finally:
        await runner.cleanup()
