"""What stands before every route: no request gets past it without a valid key that has not used up
its limits, or, while there are no keys, unless it comes from this machine's own programs.

Whatever is not named here needs a key, so a new route cannot be left open by mistake. It reads the
headers alone: the body of a request that is refused is never read.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api_proxy.access.body_budget import BodyBudget
from api_proxy.access.keyring import KeyRing
from api_proxy.access.limits import Limits
from api_proxy.errors import ApiError, ErrorShapes, foreign_request
from api_proxy.metrics import ProxyMetrics
from rollout_bridge.local_requests import refusal_of

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
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
        budget: BodyBudget,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._ring = ring
        self._limits = limits
        self._shapes = shapes
        self._metrics = metrics
        self._allowed_origins = allowed_origins
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or answer it with 401, 403, 415, 429 or 503."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                headers = Headers(scope=scope)
                caller = await self._ring.caller(headers)
                if caller.key is not None:
                    self._limits.request(caller.key)
                else:
                    self._refuse_foreign(scope["method"], headers)
            except ApiError as error:
                self._metrics.requests.labels(str(error.status)).inc()
                await self._shapes.response(scope["path"], error)(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["caller"] = caller
            with self._budget.hold(caller.scope) as state["body"]:
                await self._app(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuse_foreign(self, method: str, headers: Headers) -> None:
        """Raises ApiError for what a web page could have sent."""
        refusal = refusal_of(method, headers, self._allowed_origins)
        if refusal is not None:
            self._metrics.foreign.labels(refusal.check).inc()
            raise foreign_request(refusal)
