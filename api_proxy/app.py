"""Puts the door together: an ASGI application over a store, an engine and a rendering.

`create_app` owns none of them; whoever made them closes them after the application's lifespan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from api_proxy import errors
from api_proxy.access.gate import Gate, is_page
from api_proxy.access.keyring import KeyRing
from api_proxy.access.logins import Logins
from api_proxy.messages_api.errors import refusal as messages_refusal
from api_proxy.messages_api.routes import router as messages_router
from api_proxy.pages import login_routes, memory, now, review, sessions, training, turns
from api_proxy.pages.rendering import error_page
from api_proxy.recording import retention
from api_proxy.responses_api.routes import refusal as responses_refusal
from api_proxy.responses_api.routes import router as responses_router
from api_proxy.routes.feedback_api import router as feedback_router
from api_proxy.routes.hints_api import router as hints_router
from api_proxy.routes.model_list import router as models_router
from api_proxy.routes.routes import router
from api_proxy.routes.text_api import router as text_router
from api_proxy.server.edge import Edge
from api_proxy.turns import ProxyDeps, TurnService
from records.care.housekeeping import Housekeeping

_EXPOSED_HEADERS = ("x-request-id", "request-id", "x-turn-id", "x-session-id", "retry-after")
"""What a web page may read of a response beside its body."""

__all__ = ["ProxyDeps", "create_app"]


def create_app(deps: ProxyDeps) -> FastAPI:
    """The application. While it runs it closes idle sessions, deletes expired ones and takes in
    what was spilled; at its end it commits what waits.
    """

    ring = KeyRing(deps.store, deps.config, deps.clock)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        service: TurnService = app.state.service
        await service.spool.start()
        await ring.read()
        stop = asyncio.Event()
        sweepers = asyncio.gather(
            service.sessions.sweep(stop),
            service.places.keep_usage(stop),
            service.drop_watch.watch(stop),
            retention.sweep(
                Housekeeping(deps.store, deps.clock),
                deps.store.config.retention,
                service.metrics,
                service.sessions,
                stop,
            ),
        )
        yield
        stop.set()
        await sweepers
        await service.recorder.drain()
        await service.spool.close()
        service.workers.close()

    app = FastAPI(
        title="policy endpoint", lifespan=lifespan, openapi_url=None, redirect_slashes=False
    )
    app.state.service = TurnService(deps)
    app.state.started = deps.clock()
    app.state.now = now.NowFeed(app.state.service)
    app.state.ring, app.state.logins = ring, Logins(deps.clock)
    app.include_router(router)
    app.include_router(models_router)
    app.include_router(text_router)
    app.include_router(feedback_router)
    app.include_router(hints_router)
    for pages in (login_routes, memory, now, review, sessions, training, turns):
        app.include_router(pages.router)
    app.include_router(messages_router)
    app.include_router(responses_router)
    shapes = errors.ErrorShapes(
        {"/v1/messages": messages_refusal, "/v1/responses": responses_refusal},
        is_page,
        error_page,
    )
    errors.install(app, shapes)
    service = app.state.service
    app.add_middleware(
        Gate,
        ring=ring,
        limits=service.limits,
        shapes=shapes,
        metrics=service.metrics,
        budget=service.bodies,
        logins=app.state.logins,
        allowed_origins=deps.config.allowed_origins,
    )
    if deps.config.allowed_origins:
        # Around the gate: a browser asks without a key whether it may send one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=deps.config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(Edge)
    return app
