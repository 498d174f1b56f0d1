"""The tables of API keys: the keys without their secrets, what was done to them, what they used."""

from __future__ import annotations

from sqlalchemy import BigInteger, Double, LargeBinary, Text
from sqlalchemy.orm import Mapped, mapped_column

from records.names import Consent
from records.tables.columns import CleanText, enum_column
from records.tables.models import Base


class KeyRow(Base):
    """An API key, without its secret; see `records.keys.ApiKey`."""

    __tablename__ = "api_keys"
    key_id: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str] = mapped_column(CleanText)
    tenant: Mapped[str] = mapped_column(CleanText)
    is_admin: Mapped[bool]
    consent: Mapped[Consent] = mapped_column(enum_column(Consent))
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[float] = mapped_column(Double)
    rotated_at: Mapped[float | None] = mapped_column(Double)
    revoked_at: Mapped[float | None] = mapped_column(Double)
    old_hash: Mapped[bytes | None] = mapped_column(LargeBinary)
    old_until: Mapped[float | None] = mapped_column(Double)
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)
    max_concurrent: Mapped[int | None] = mapped_column(BigInteger)


class KeyEventRow(Base):
    """What was done to an API key, when and by whom."""

    __tablename__ = "key_events"
    number: Mapped[int] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(Text)
    action: Mapped[str] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(CleanText)
    at: Mapped[float] = mapped_column(Double)


class KeyUsageRow(Base):
    """Tokens that a key used on a day; days are counted since 1970-01-01 (UTC)."""

    __tablename__ = "key_usage"
    key_id: Mapped[str] = mapped_column(Text, primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_tokens: Mapped[int] = mapped_column(BigInteger)
