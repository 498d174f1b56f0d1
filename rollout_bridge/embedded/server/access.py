"""Who may use an embedded engine: whoever knows its key, or, without one, this machine's programs.

SGLang's form (`--api-key`): `Authorization: Bearer KEY` on every route except those that begin with
`/health`, and the same refusal. An engine takes new weights, pauses and shows what others generate,
so being on the same machine is not enough.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_bridge.embedded.server.http import openai_error
from rollout_bridge.local_requests import refusal_of


class Access:
    """ASGI middleware that refuses before a body is read."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with 401, 403 or 415."""
        if scope["type"] == "http" and not scope["path"].startswith("/health"):
            headers = Headers(scope=scope)
            if self._key is not None:
                if not self._is_known(headers):
                    await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                    return
            elif refusal := refusal_of(scope["method"], headers):
                refused = openai_error(refusal.message, status=refusal.status)
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        assert self._key is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(
            given.encode("latin-1"), self._key
        )
