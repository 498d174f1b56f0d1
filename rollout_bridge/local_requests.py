"""Whether a request to a server without keys comes from this machine's own programs.

Such a server trusts whoever reaches it over loopback. That includes a web page that the user has
open: it may post to 127.0.0.1, and with a host name of its own that points there (DNS rebinding) it
may even read. A page cannot choose the headers that are checked here. Pure; knows no server.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from email.message import Message
from functools import lru_cache
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers

Check = Literal["host", "origin", "content_type"]

_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
_OWN_SITES = frozenset({"same-origin", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Which check a request failed, the status of the answer, and what to do about it."""

    check: Check
    status: int
    message: str


_HOST = Refusal(
    check="host",
    status=403,
    message="While there is no API key, the Host header must be one of this machine's own names: "
    "localhost, 127.0.0.1, [::1]. Use one of them, or create a key.",
)
_ORIGIN = Refusal(
    check="origin",
    status=403,
    message="While there is no API key, web pages of another origin are refused (Origin and "
    "Sec-Fetch-Site headers). Call from a program, or create a key.",
)
_CONTENT_TYPE = Refusal(
    check="content_type",
    status=415,
    message="While there is no API key, a body must be declared as JSON: add the header "
    "'Content-Type: application/json' (curl: -H 'Content-Type: application/json').",
)


def refusal_of(
    method: str, headers: Headers, allowed_origins: Collection[str] = ()
) -> Refusal | None:
    """Why a server without keys refuses this request; None if it may be answered.

    Pages of `allowed_origins` ("https://host:port", as browsers write it) are allowed too.
    """
    host = _only(headers.getlist("host"))
    if host is None or not is_loopback_host(host):
        return _HOST
    if not _is_own_page(headers, host, allowed_origins):
        return _ORIGIN
    if method in _BODY_METHODS and not _is_json_or_empty(headers):
        return _CONTENT_TYPE
    return None


@lru_cache(64)
def is_loopback_host(host: str) -> bool:
    """Whether a Host header, with any port, names this machine, not by a name that DNS resolves."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return False
    # Exactly name and port: neither user, path nor blanks, which parsers read in different ways.
    if parts.netloc != host or parts.username is not None or host.strip() != host:
        return False
    name = parts.hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_own_page(headers: Headers, host: str, allowed_origins: Collection[str]) -> bool:
    origins = headers.getlist("origin")
    if not origins:
        # Browsers send no Origin for what a page merely embeds, but they tell the page's site.
        return headers.get("sec-fetch-site", "none") in _OWN_SITES
    origin = _only(origins)
    if origin is None:
        return False
    own = {f"http://{host}".lower(), f"https://{host}".lower()}
    return origin.lower() in own or origin in allowed_origins


def _is_json_or_empty(headers: Headers) -> bool:
    kinds = headers.getlist("content-type")
    if not kinds:
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        return not has_body
    message = Message()
    message["content-type"] = _only(kinds) or "several"
    kind = message.get_content_type()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _only(values: Sequence[str]) -> str | None:
    """The value of a header that may occur only once."""
    return values[0] if len(values) == 1 else None
