"""The check before every route: a request needs a valid key that has not used up its limits or,
while there are no keys, must come from a program on this machine.

Whatever is not named here needs a key, so a new route cannot be left open by mistake. It reads only
the headers: the body of a refused request is never read. Pages, and GET requests about runs, accept
the cookie of a login instead of a key.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from api_proxy.access.body_budget import BodyBudget
from api_proxy.access.callers import Caller, credentials_of
from api_proxy.access.keyring import KeyRing
from api_proxy.access.limits import Limits
from api_proxy.access.logins import COOKIE, Login, Logins
from api_proxy.errors import ApiError, ErrorShapes, foreign_request
from api_proxy.metrics import ProxyMetrics
from rollout_bridge.local_requests import refusal_of

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Whether this process is alive and ready: what asks for that has no key."""
PAGES = "/ui"
LOGIN_PATH = "/ui/login"
_STATIC = "/ui/static/"
_RUNS = "/v1/runs/"
_NOBODY = "login"
"""The scope of the login form."""


class Gate:
    """ASGI middleware that finds the caller of each request (`callers.caller_of`), or refuses
    it.
    """

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        limits: Limits,
        shapes: ErrorShapes,
        metrics: ProxyMetrics,
        budget: BodyBudget,
        logins: Logins,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._ring = ring
        self._limits = limits
        self._shapes = shapes
        self._metrics = metrics
        self._allowed_origins = allowed_origins
        self._budget = budget
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or answer it with 401, 403, 415, 429 or 503."""
        if (
            scope["type"] != "http"
            or scope["path"] in OPEN_PATHS
            or scope["path"].startswith(_STATIC)
        ):
            await self._app(scope, receive, send)
            return
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        try:
            caller, login = await self._caller(scope, headers)
            if caller is None:
                await self._ask_for_key(scope, receive, send)
                return
            if caller.key is not None:
                self._limits.request(caller.key)
            else:
                self._refuse_foreign(scope, headers)
        except ApiError as error:
            self._metrics.requests.labels(str(error.status)).inc()
            await self._shapes.response(scope["path"], error)(scope, receive, send)
            return
        state["caller"], state["login"] = caller, login
        with self._budget.hold(caller.scope) as state["body"]:
            await self._app(scope, receive, send)

    async def _ask_for_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a page request without a login: only the login page is available. It gets no
        caller, because one without a key would count as that of a run without keys.
        """
        if scope["path"] != LOGIN_PATH:
            await RedirectResponse(LOGIN_PATH, status_code=303)(scope, receive, send)
            return
        with self._budget.hold(_NOBODY) as scope["state"]["body"]:
            await self._app(scope, receive, send)

    async def _caller(self, scope: Scope, headers: Headers) -> tuple[Caller | None, Login | None]:
        """The caller of a request, and its login; no caller for a page without a login. Raises
        ApiError 401 or 503.
        """
        path = scope["path"]
        takes_cookie = is_page(path) or (path.startswith(_RUNS) and scope["method"] == "GET")
        if not takes_cookie or credentials_of(headers) or not await self._ring.has_keys():
            return await self._ring.caller(headers), None
        login = self._logins.of(cookie_parser(headers.get("cookie", "")).get(COOKIE))
        if login is not None:
            caller = await self._ring.caller_by_hash(login.key_id, login.secret_hash)
            if caller is not None:
                return caller, login
        # Anything but a page gives 401, as usual.
        return (None if is_page(path) else await self._ring.caller(headers)), None

    def _refuse_foreign(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError for what a web page could have sent. The forms of our pages are not JSON:
        they contain a token that other pages cannot know.
        """
        refusal = refusal_of(scope["method"], headers, self._allowed_origins)
        if refusal is None or (refusal.check == "content_type" and is_page(scope["path"])):
            return
        self._metrics.foreign.labels(refusal.check).inc()
        raise foreign_request(refusal)


def is_page(path: str) -> bool:
    """Whether this is the path of a page for people."""
    return path == PAGES or path.startswith(f"{PAGES}/")
