"""API keys: who may use the endpoint, how much, and what may become of what they send.

A key is `opd_ID_SECRET`. The id is public: it appears in lists, logs and the audit trail. The
secret is 256 random bits, of which only the SHA-256 is stored: a fast hash is enough, because
nobody can try 2^256 secrets, and a slow one would cost every request what it costs an attacker.
Each change is noted with its author, in the same transaction.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from sqlalchemy import Connection, Row, insert, select, update

from records.errors import UnknownKey
from records.names import Consent
from records.store import Store
from records.tables.key_rows import KeyEventRow, KeyRow, KeyUsageRow
from records.tables.sql import insert_missing, table_of

KEY = re.compile(r"opd_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
"""A whole key, as its owner has it."""

Action = Literal["create", "rotate", "revoke"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may use; None: unlimited. Tokens are those of prompts and replies."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without its secret. Keys of one tenant share their conversations; times are in unix
    seconds. After a rotation `old_hash` is accepted until `old_until`.
    """

    key_id: str
    name: str
    tenant: str
    is_admin: bool
    consent: Consent
    limits: KeyLimits
    secret_hash: bytes
    created_at: float
    rotated_at: float | None = None
    revoked_at: float | None = None
    old_hash: bytes | None = None
    old_until: float | None = None

    def accepts(self, secret: str, now: float) -> bool:
        """Whether this is the key's secret; takes the same time for every secret."""
        return self.accepts_hash(hash_of(secret), now)

    def accepts_hash(self, given: bytes, now: float) -> bool:
        """Whether this is `hash_of` the key's secret; takes the same time for every hash."""
        is_new = hmac.compare_digest(given, self.secret_hash)
        is_old = hmac.compare_digest(given, self.old_hash or b"")
        is_old = is_old and self.old_until is not None and now < self.old_until
        return (is_new or is_old) and self.revoked_at is None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEvent:
    """A change of a key: what was done, when (unix seconds) and by whom."""

    key_id: str
    action: Action
    actor: str
    at: float


class Keys:
    """The keys of an open store. All methods may raise StoreUnavailable."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    async def create(
        self,
        *,
        actor: str,
        name: str = "",
        tenant: str | None = None,
        is_admin: bool = False,
        consent: Consent = Consent.TRAIN,
        limits: KeyLimits | None = None,
    ) -> tuple[ApiKey, str]:
        """A new key, and its text, which is not kept. Without a `tenant`, it is its own tenant."""
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        key = ApiKey(
            key_id=key_id,
            name=name,
            tenant=key_id if tenant is None else tenant,
            is_admin=is_admin,
            consent=consent,
            limits=limits or KeyLimits(),
            secret_hash=hash_of(secret),
            created_at=self._clock(),
        )
        await self._store.write(_create_op, key=key, actor=actor)
        return key, _text(key_id, secret)

    async def rotate(self, key_id: str, *, actor: str, overlap_s: float = 0.0) -> str:
        """A new secret for a key; the old one keeps working for `overlap_s`. Returns the text.

        Raises UnknownKey, also for one that was revoked.
        """
        secret, now = secrets.token_urlsafe(32), self._clock()
        change = partial(_rotated, secret_hash=hash_of(secret), now=now, overlap_s=overlap_s)
        await self._change(key_id, change, _event(key_id, "rotate", actor, now))
        return _text(key_id, secret)

    async def revoke(self, key_id: str, *, actor: str) -> None:
        """Revoke a key for good. Raises UnknownKey, also for one that was revoked."""
        now = self._clock()
        change = partial(_revoked, now=now)
        await self._change(key_id, change, _event(key_id, "revoke", actor, now))

    async def _change(
        self, key_id: str, change: Callable[[ApiKey], ApiKey], event: KeyEvent
    ) -> None:
        await self._store.write(_change_op, key_id=key_id, change=change, event=event)

    async def all(self) -> list[ApiKey]:
        """Every key, revoked ones too, oldest first."""
        return await self._store.read(_all)

    async def add_usage(self, tokens: Mapping[tuple[str, int], int]) -> None:
        """Add tokens that were used, by (key id, day)."""
        await self._store.write(_add_usage_op, tokens=tokens)

    async def usage(self, day: int) -> dict[str, int]:
        """Tokens used on a day (days since 1970-01-01, UTC), by key id."""
        return await self._store.read(_usage, day=day)

    async def events(self) -> list[KeyEvent]:
        """What was done to keys, oldest first."""
        return await self._store.read(_events)


def parsed(text: str) -> tuple[str, str] | None:
    """(key id, secret) of a key's text; None for anything else."""
    match = KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def _text(key_id: str, secret: str) -> str:
    return f"opd_{key_id}_{secret}"


def hash_of(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def _rotated(key: ApiKey, secret_hash: bytes, now: float, overlap_s: float) -> ApiKey:
    # At most one old secret: rotating twice within the overlap ends the first one.
    old_hash, old_until = (key.secret_hash, now + overlap_s) if overlap_s > 0 else (None, None)
    return replace(
        key, secret_hash=secret_hash, rotated_at=now, old_hash=old_hash, old_until=old_until
    )


def _revoked(key: ApiKey, now: float) -> ApiKey:
    return replace(key, revoked_at=now, old_hash=None, old_until=None)


def _event(key_id: str, action: Action, actor: str, at: float) -> KeyEvent:
    return KeyEvent(key_id=key_id, action=action, actor=actor, at=at)


def _create_op(connection: Connection, key: ApiKey, actor: str) -> None:
    connection.execute(insert(KeyRow), _values(key))
    _note(connection, _event(key.key_id, "create", actor, key.created_at))


def _change_op(
    connection: Connection, key_id: str, change: Callable[[ApiKey], ApiKey], event: KeyEvent
) -> None:
    statement = select(table_of(KeyRow)).where(KeyRow.key_id == key_id).with_for_update()
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise UnknownKey(f"no API key {key_id!r}: `opd keys list` shows them")
    key = _key(row)
    if key.revoked_at is not None:
        raise UnknownKey(f"the API key {key_id!r} was revoked: create a new one")
    values = _values(change(key))
    connection.execute(update(KeyRow).where(KeyRow.key_id == key_id).values(**values))
    _note(connection, event)


def _values(key: ApiKey) -> dict[str, Any]:
    values = asdict(key)
    limits = values.pop("limits")
    return {**values, **limits}


def _key(row: Row[Any]) -> ApiKey:
    values = dict(row._mapping)
    limits = {field.name: values.pop(field.name) for field in fields(KeyLimits)}
    return ApiKey(limits=KeyLimits(**limits), **values)


def _add_usage_op(connection: Connection, tokens: Mapping[tuple[str, int], int]) -> None:
    """Row by row, in a fixed order: two proxies may add at the same time."""
    for (key_id, of_day), number in sorted(tokens.items()):
        place = {"key_id": key_id, "day": of_day}
        insert_missing(connection, KeyUsageRow, [{**place, "num_tokens": 0}])
        connection.execute(
            update(KeyUsageRow)
            .where(KeyUsageRow.key_id == key_id, KeyUsageRow.day == of_day)
            .values(num_tokens=KeyUsageRow.num_tokens + number)
        )


def _usage(connection: Connection, day: int) -> dict[str, int]:
    statement = select(KeyUsageRow.key_id, KeyUsageRow.num_tokens).where(KeyUsageRow.day == day)
    return {row.key_id: row.num_tokens for row in connection.execute(statement)}


def _note(connection: Connection, event: KeyEvent) -> None:
    connection.execute(insert(KeyEventRow), asdict(event))


def _all(connection: Connection) -> list[ApiKey]:
    statement = select(table_of(KeyRow)).order_by(KeyRow.created_at, KeyRow.key_id)
    return [_key(row) for row in connection.execute(statement)]


def _events(connection: Connection) -> list[KeyEvent]:
    statement = select(table_of(KeyEventRow)).order_by(KeyEventRow.number)
    rows = connection.execute(statement)
    return [KeyEvent(key_id=r.key_id, action=r.action, actor=r.actor, at=r.at) for r in rows]
