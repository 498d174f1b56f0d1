"""What stands before every route: no request gets past it without a valid key that has not used up
its limits.

Whatever is not named here needs a key, so a new route cannot be left open by mistake. It reads the
headers alone: the body of a request that is refused is never read.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api_proxy.errors import ApiError, ErrorShapes
from api_proxy.keyring import KeyRing
from api_proxy.limits import Limits
from api_proxy.metrics import ProxyMetrics

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Whether this process lives and is ready: what asks that has no key."""


class Gate:
    """ASGI middleware that says whose each request is (`callers.caller_of`), or refuses it."""

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        limits: Limits,
        shapes: ErrorShapes,
        metrics: ProxyMetrics,
    ) -> None:
        self._app = app
        self._ring = ring
        self._limits = limits
        self._shapes = shapes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or answer it with 401, 429 or 503."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                caller = await self._ring.caller(Request(scope).headers)
                if caller.key is not None:
                    self._limits.request(caller.key)
            except ApiError as error:
                self._metrics.requests.labels(str(error.status)).inc()
                await self._shapes.response(scope["path"], error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
