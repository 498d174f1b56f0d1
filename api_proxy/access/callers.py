"""Who sends a request, which conversations they may see and continue, and what it may be used for.

`gate.Gate` finds this out and attaches it to the request; routes ask `caller_of`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import Request

from api_proxy.errors import admin_key_needed
from records.keys import ApiKey
from records.names import Consent

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request. Conversations of different scopes never meet.

    `key` is None if there are no keys at all: whatever a client sends as its key then only tells
    conversations apart.
    """

    scope: str
    key: ApiKey | None = None

    @property
    def consent(self) -> Consent:
        """What the content of the request may be used for."""
        return Consent.TRAIN if self.key is None else self.key.consent

    @property
    def is_admin(self) -> bool:
        """Whether it may use what is reserved for admins."""
        return self.key is None or self.key.is_admin

    @property
    def cache_scope(self) -> str | None:
        """Namespace of the engine's prefix cache; None for the shared one."""
        return None if self.key is None else self.scope


def caller_of(request: Request) -> Caller:
    """Who sent this request."""
    return request.state.caller


def admin_only(request: Request) -> None:
    """As a dependency of a route: refuses other keys. Raises ApiError 403."""
    if not caller_of(request).is_admin:
        raise admin_key_needed()


def credentials_of(headers: Mapping[str, str]) -> str | None:
    """The key of a request: `Authorization: Bearer`, or the `x-api-key` of Anthropic's clients."""
    authorization = headers.get("authorization", "")
    scheme, _, rest = authorization.partition(" ")
    key = rest if scheme.lower() == "bearer" else authorization
    return key.strip() or headers.get("x-api-key", "").strip() or None


def anonymous_scope(key: str | None) -> str:
    """The scope for what a client sends as its key while there are no keys. The key itself is not
    kept.
    """
    if key is None:
        return ANONYMOUS
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def tenant_scope(tenant: str) -> str:
    """The scope of all keys of a tenant."""
    return f"tenant:{tenant}"
