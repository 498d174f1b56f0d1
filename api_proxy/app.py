"""Assembles the endpoint: an ASGI application over a store, an engine and a rendering.

`create_app` owns none of them; whoever made them closes them after the application's lifespan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from api_proxy import errors
from api_proxy.access.gate import Gate, is_page
from api_proxy.access.keyring import KeyRing
from api_proxy.access.logins import Logins
from api_proxy.config import ProxyConfig
from api_proxy.deps import ProxyDeps
from api_proxy.messages_api.errors import refusal as messages_refusal
from api_proxy.messages_api.routes import messages
from api_proxy.messages_api.routes import router as messages_router
from api_proxy.pages import login_routes, memory, now, review, sessions, training, turns
from api_proxy.pages.rendering import error_page
from api_proxy.recording import retention
from api_proxy.recording.indexing import index_texts
from api_proxy.responses_api.routes import refusal as responses_refusal
from api_proxy.responses_api.routes import responses
from api_proxy.responses_api.routes import router as responses_router
from api_proxy.routes.feedback_api import router as feedback_router
from api_proxy.routes.hints_api import router as hints_router
from api_proxy.routes.model_list import router as models_router
from api_proxy.routes.routes import chat_completions, router
from api_proxy.routes.text_api import completions
from api_proxy.server.edge import Edge
from api_proxy.turns import TurnService
from records.care.housekeeping import Housekeeping

_EXPOSED_HEADERS = ("x-request-id", "request-id", "x-turn-id", "x-session-id", "retry-after")
"""What a web page may read from a response besides its body."""

TURN_ROUTES = (
    ("/v1/chat/completions", chat_completions),
    ("/v1/messages", messages),
    ("/v1/responses", responses),
    ("/v1/completions", completions),
)
"""Agents ask here for turns. These are Starlette's routes: they check their bodies themselves, so
what FastAPI's do around them would only take time.
"""
ROUTERS = (
    router,
    models_router,
    feedback_router,
    hints_router,
    *(page.router for page in (login_routes, memory, now, review, sessions, training, turns)),
    messages_router,
    responses_router,
)
"""All other routes."""

__all__ = ["ProxyDeps", "create_app"]


def create_app(deps: ProxyDeps) -> FastAPI:
    """The application. While it runs, it stores what was spilled, and the first worker of an
    endpoint closes idle sessions and deletes expired ones; at its end, it commits what is waiting.
    """
    ring = KeyRing(deps.store, deps.config, deps.clock)
    logins = Logins(deps.clock, deps.sharing)
    app = FastAPI(
        title="policy endpoint",
        lifespan=partial(_lifespan, deps=deps, ring=ring),
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.service = TurnService(deps)
    app.state.started = deps.clock()
    app.state.now = now.NowFeed(app.state.service)
    app.state.ring, app.state.logins = ring, logins
    for path, endpoint in TURN_ROUTES:
        app.add_route(path, endpoint, methods=["POST"])
    for one in ROUTERS:
        app.include_router(one)
    shapes = errors.ErrorShapes(
        {"/v1/messages": messages_refusal, "/v1/responses": responses_refusal},
        is_page,
        error_page,
    )
    errors.install(app, shapes)
    _add_middleware(app, deps.config, ring, logins, shapes)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI, *, deps: ProxyDeps, ring: KeyRing) -> AsyncGenerator[None, None]:
    service: TurnService = app.state.service
    await service.spool.start()
    await ring.read()
    stop = asyncio.Event()
    work = [service.places.keep_usage(stop), service.drop_watch.watch(stop)]
    if service.worker_metrics is not None:
        work.append(service.worker_metrics.keep_written(stop))
    if deps.sharing.is_first:
        work += _upkeep(service, stop)
    sweepers = asyncio.gather(*work)
    yield
    stop.set()
    await sweepers
    await service.recorder.drain()
    await service.spool.close()
    service.workers.close()


def _upkeep(service: TurnService, stop: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
    """What is done once for a store, until `stop`, however many workers there are."""
    store = service.deps.store
    return [
        service.sessions.sweep(stop),
        index_texts(store, service.metrics, stop),
        retention.sweep(
            Housekeeping(store, service.deps.clock),
            store.config.retention,
            service.metrics,
            service.sessions,
            stop,
        ),
    ]


def _add_middleware(
    app: FastAPI, config: ProxyConfig, ring: KeyRing, logins: Logins, shapes: errors.ErrorShapes
) -> None:
    """Add what each request passes through, innermost first."""
    service: TurnService = app.state.service
    app.add_middleware(
        Gate,
        ring=ring,
        limits=service.limits,
        shapes=shapes,
        metrics=service.metrics,
        budget=service.bodies,
        logins=logins,
        allowed_origins=config.allowed_origins,
    )
    if config.allowed_origins:
        # Around the gate: a browser asks without a key whether it may send one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(Edge)
