"""What a request meets first: its id, and equivalent spellings of method and path.

A path may end with a slash: it is served like the path without it, and never redirected, since a
redirect behind TLS would lead to `http`. HEAD is answered like GET, without a body. It only looks
at the request line and one header, so it comes before the gate.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_proxy.server import request_ids

logger = logging.getLogger(__name__)

READINESS = "/readyz"
"""A 503 there only says that the endpoint is not ready yet: no reason for a warning."""


class Edge:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; its response carries its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_ids.begin(Headers(scope=scope).get("x-request-id"))
        # Shared with the scope that the handler of unexpected faults sees.
        scope.setdefault("state", {})["request_id"] = request_id
        is_head = scope["method"] == "HEAD"
        is_probe = scope["path"].rstrip("/") == READINESS

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(request_ids.headers_of(request_id))
                if message["status"] >= 500 and not is_probe:
                    logger.warning("%s answered with %d", request_id, message["status"])
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(_plain(scope), receive, answer)


def _plain(scope: Scope) -> Scope:
    """The scope with the method and the path that routes know."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
