"""Logging in to the pages and out again, and the static files of the pages."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, RedirectResponse, Response

from api_proxy.access.admission import body_of
from api_proxy.access.gate import LOGIN_PATH, PAGES
from api_proxy.access.keyring import KeyRing
from api_proxy.access.logins import COOKIE, LOGIN_S, Logins
from api_proxy.errors import ApiError, invalid
from api_proxy.pages.rendering import HEADERS, form_page
from api_proxy.turns import TurnService
from records.keys import hash_of, parsed

router = APIRouter()

FILES = Path(__file__).parent / "static"
_STATIC = {"pages.css": "text/css", "pages.js": "text/javascript", "icon.svg": "image/svg+xml"}
_MOST_BYTES = 8192
"""For a form: a key or a token, and little else."""
_FOREIGN = (
    "This form was sent by a page of another site. Open the page again and send it from there."
)


@router.get(LOGIN_PATH)
async def login_page(request: Request) -> Response:
    """The form that asks for a key; redirects to the pages if none is needed."""
    ring: KeyRing = request.app.state.ring
    if not await ring.has_keys():
        return RedirectResponse(PAGES, status_code=303)
    return form_page("login.html.jinja", message=None)


@router.post(LOGIN_PATH)
async def log_in(request: Request) -> Response:
    """Take a key once; from then on, a cookie stands for it."""
    ring: KeyRing = request.app.state.ring
    logins: Logins = request.app.state.logins
    refuse_foreign_form(request)
    named = parsed((await form_of(request)).get("key", "").strip())
    caller = None if named is None else await ring.caller_by_hash(named[0], hash_of(named[1]))
    if named is None or caller is None:
        message = "No such key, or it is no longer valid. Check it and try again."
        return form_page("login.html.jinja", status=401, message=message)
    response = RedirectResponse(PAGES, status_code=303, headers={"Cache-Control": "no-store"})
    response.set_cookie(
        COOKIE,
        logins.begin(named[0], hash_of(named[1])),
        max_age=int(LOGIN_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.get(PAGES)
async def first_page() -> Response:
    """Redirect to the first of the pages."""
    return RedirectResponse("/ui/now", status_code=303)


@router.post("/ui/logout")
async def log_out(request: Request) -> Response:
    """End the login here, and forget the cookie there."""
    await checked_form(request)
    logins: Logins = request.app.state.logins
    logins.end(request.cookies.get(COOKIE))
    response = RedirectResponse(LOGIN_PATH, status_code=303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


@router.get("/ui/static/{name}")
async def static_file(name: str) -> Response:
    """One of the files that pages need."""
    if name not in _STATIC:
        raise ApiError(404, "There is no such file.", code="unknown_url")
    headers = {**HEADERS, "Cache-Control": "no-cache"}
    return FileResponse(FILES / name, media_type=_STATIC[name], headers=headers)


async def checked_form(request: Request, most_bytes: int = _MOST_BYTES) -> dict[str, str]:
    """The fields of a form that changes something. Raises ApiError 403 unless one of our pages sent
    it, under this login.
    """
    refuse_foreign_form(request)
    fields = await form_of(request, most_bytes)
    logins: Logins = request.app.state.logins
    if not logins.is_csrf(request.state.login, fields.get("csrf", "")):
        raise ApiError(403, _FOREIGN, code="foreign_origin")
    return fields


async def form_of(request: Request, most_bytes: int = _MOST_BYTES) -> dict[str, str]:
    """The fields of a short form, each once. Raises ApiError 400, 408 or 413."""
    service: TurnService = request.app.state.service

    def check(num_bytes: int) -> None:
        if num_bytes > most_bytes:
            raise ApiError(413, f"The form is longer than {most_bytes} bytes.")

    raw = await body_of(request, check, service.config.body_timeout_s)
    try:
        fields = parse_qs(raw.decode(), strict_parsing=bool(raw), max_num_fields=10)
    except ValueError:
        raise invalid("The form cannot be read.") from None
    return {name: values[0] for name, values in fields.items()}


def refuse_foreign_form(request: Request) -> None:
    """Raises ApiError 403 for a form that a page of another site sent, as browsers report it."""
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:
        is_own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not is_own:
        raise ApiError(403, _FOREIGN, code="foreign_origin")
