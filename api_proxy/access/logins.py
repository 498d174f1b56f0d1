"""Who is logged in to the pages: random cookies, kept in this process and nowhere else.

A cookie stands for a key without containing it. It ends with its key, after `LOGIN_S`, when its
owner logs out, or with this process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

LOGIN_S = 12 * 3600.0
"""A login ends after this long; then the key is asked for again."""
COOKIE = "opd_login"
_MOST = 1000
"""Logins at a time; one more ends the oldest."""
_MOST_OF_KEY = 50
"""Logins of one key, so that one key does not end those of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A key that somebody logged in with, by the hash of its secret; `until` in unix seconds.
    `csrf` is the token of forms.
    """

    key_id: str
    secret_hash: bytes
    csrf: str
    until: float


class Logins:
    """The logins of one application. `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logins: dict[bytes, Login] = {}
        self._csrf_without_keys = secrets.token_urlsafe(32)

    def begin(self, key_id: str, secret_hash: bytes) -> str:
        """The cookie of a new login."""
        now = self._clock()
        self._logins = {name: one for name, one in self._logins.items() if now < one.until}
        own = [name for name, one in self._logins.items() if one.key_id == key_id]
        for name in own[: max(len(own) + 1 - _MOST_OF_KEY, 0)]:
            del self._logins[name]
        while len(self._logins) >= _MOST:
            del self._logins[next(iter(self._logins))]
        cookie = secrets.token_urlsafe(32)
        self._logins[_name(cookie)] = Login(
            key_id=key_id,
            secret_hash=secret_hash,
            csrf=secrets.token_urlsafe(32),
            until=now + LOGIN_S,
        )
        return cookie

    def of(self, cookie: str | None) -> Login | None:
        """The login of a cookie; None if there is none, or it has ended."""
        if cookie is None:
            return None
        login = self._logins.get(_name(cookie))
        return login if login is not None and self._clock() < login.until else None

    def end(self, cookie: str | None) -> None:
        """Log out."""
        if cookie is not None:
            self._logins.pop(_name(cookie), None)

    def csrf_of(self, login: Login | None) -> str:
        """The token that a form sends back. While there are no keys, and so no logins, there is one
        for all, which pages of other origins cannot read.
        """
        return self._csrf_without_keys if login is None else login.csrf

    def is_csrf(self, login: Login | None, sent: str) -> bool:
        """Whether a form came from a page of this login."""
        expected = self.csrf_of(login).encode()
        return hmac.compare_digest(expected, sent.encode("utf-8", "surrogatepass"))


def _name(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
