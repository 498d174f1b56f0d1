"""Who is logged in to the pages: random cookies, kept in the endpoint's memory and nowhere else.

A cookie stands for a key without containing it. It ends with its key, after `LOGIN_S`, when its
owner logs out, or with the endpoint.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from api_proxy.sharing.sharing import Sharing

LOGIN_S = 12 * 3600.0
"""A login ends after this long; then the key is asked for again."""
COOKIE = "opd_login"
_MOST_OF_KEY = 50
"""Logins of one key; one more ends its oldest, and none of other keys."""
_NAME_BYTES = 32
_LOGIN = struct.Struct("<d32s43s")
"""Until when, hash of the secret, token of forms; the key's id follows."""


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
    """The logins of one endpoint. `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float], sharing: Sharing) -> None:
        self._clock = clock
        self._logins = sharing.logins
        self._of_key = sharing.logins_of_key
        self._csrf_without_keys = sharing.secret.hex()

    def begin(self, key_id: str, secret_hash: bytes) -> str:
        """The cookie of a new login."""
        cookie, until = secrets.token_urlsafe(32), self._clock() + LOGIN_S
        csrf = secrets.token_urlsafe(32).encode()
        packed = _LOGIN.pack(until, secret_hash, csrf) + key_id.encode()
        self._logins.put(_name(cookie).hex(), packed)
        with self._of_key.held(key_id) as cell:
            names = [one for one in _split(cell.value or b"") if self._logins.get(one.hex())]
            names.append(_name(cookie))
            cell.value = b"".join(names[-_MOST_OF_KEY:])
        for ended in names[:-_MOST_OF_KEY]:
            self._logins.pop(ended.hex())
        return cookie

    def of(self, cookie: str | None) -> Login | None:
        """The login of a cookie; None if there is none, or it has ended."""
        packed = None if cookie is None else self._logins.get(_name(cookie).hex())
        if packed is None:
            return None
        until, secret_hash, csrf = _LOGIN.unpack_from(packed)
        if self._clock() >= until:
            return None
        key_id = packed[_LOGIN.size :].decode()
        return Login(key_id=key_id, secret_hash=secret_hash, csrf=csrf.decode(), until=until)

    def end(self, cookie: str | None) -> None:
        """Log out."""
        if cookie is not None:
            self._logins.pop(_name(cookie).hex())

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


def _split(names: bytes) -> list[bytes]:
    return [names[at : at + _NAME_BYTES] for at in range(0, len(names), _NAME_BYTES)]
