"""Makes pages from templates. What is stored is hostile: all of it is escaped and made visible. No
page has inline scripts or styles.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import BaseLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from api_proxy.access.callers import caller_of
from api_proxy.access.logins import Login, Logins
from api_proxy.errors import ApiError
from api_proxy.pages.words import day_and_time, not_practised, number, seen, span

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""For each page: only our own files, in no frame, stored nowhere."""


def _seen_once(value: Any) -> Any:
    """Markup that a template made was already made visible value by value."""
    return value if isinstance(value, Markup) else seen(value)


def environment_of(loader: BaseLoader) -> Environment:
    """An environment for templates of pages: values are escaped, and every character is visible."""
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_seen_once,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters["time"] = day_and_time
    environment.filters["number"] = number
    environment.filters["span"] = span
    environment.filters["not_practised"] = not_practised
    return environment


_TEMPLATES = environment_of(PackageLoader("api_proxy.pages"))


async def page(request: Request, template: str, **values: Any) -> Response:
    """A page, made in a thread: a long one would block the loop."""
    login: Login | None = request.state.login
    logins: Logins = request.app.state.logins
    caller = caller_of(request)
    shown = {
        "csrf": logins.csrf_of(login),
        "is_logged_in": login is not None,
        "who": "" if caller.key is None else caller.key.name or caller.key.key_id,
        "path": request.url.path,
        **values,
    }
    return await asyncio.to_thread(_rendered, template, 200, shown)


def fragment(template: str, **values: Any) -> str:
    """A part of a page as HTML."""
    return _TEMPLATES.get_template(template).render(values)


def form_page(template: str, *, status: int = 200, **values: Any) -> Response:
    """A short page without a caller."""
    nobody = {"csrf": "", "is_logged_in": False, "who": "", "path": ""}
    return _rendered(template, status, {**nobody, **values})


def error_page(error: ApiError) -> Response:
    """An error, in words."""
    response = form_page("error.html.jinja", status=error.status, message=error.message)
    response.headers.update(error.headers)
    return response


def json_reply(value: Any) -> Response:
    """JSON in plain ASCII: half a surrogate pair is not UTF-8. Raises ValueError for NaN."""
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _rendered(template: str, status: int, values: dict[str, Any]) -> Response:
    return HTMLResponse(fragment(template, **values), status_code=status, headers=HEADERS)
