"""Up to which version a store was found equal to the chain of manifests.

What was equal once stays so: only steps, which make newer versions, and a trainer's start change
what trained. So a start compares only what is newer, if the chain still begins as it did then. It
does not know how store and chain are compared (records/training/reconcile.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, Connection, Double, Text, delete, select
from sqlalchemy.orm import Mapped, mapped_column

from records.tables.models import Base
from records.tables.sql import upsert
from records.types import PolicyVersion

Chain = Sequence[tuple[PolicyVersion, Sequence[str]]]

_NUMBER = 1


class AgreementRow(Base):
    """The newest comparison, the only row; see `Agreement`. `chain_hash` identifies the versions up
    to `version`.
    """

    __tablename__ = "agreements"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger)
    chain_hash: Mapped[str] = mapped_column(Text)
    agreed_at: Mapped[float] = mapped_column(Double)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Store and chain were equal up to `version`, at `agreed_at` (unix seconds)."""

    version: int
    agreed_at: float


def fitting(connection: Connection, chain: Chain, lessons: Chain) -> Agreement | None:
    """The newest comparison; None if there was none, or this chain begins differently."""
    row = connection.execute(select(AgreementRow.__table__)).one_or_none()
    if row is None or all(version.version != row.version for version, _ in chain):
        return None
    if _hash(chain, lessons, row.version) != row.chain_hash:
        return None
    return Agreement(version=row.version, agreed_at=row.agreed_at)


def agree(connection: Connection, chain: Chain, lessons: Chain, now: float) -> None:
    """Note that the store is equal to this chain."""
    if not chain:
        forget(connection)
        return
    last = chain[-1][0].version
    row = {
        "number": _NUMBER,
        "version": last,
        "chain_hash": _hash(chain, lessons, last),
        "agreed_at": now,
    }
    upsert(connection, AgreementRow, [row])


def forget(connection: Connection) -> None:
    """Make the next start compare everything."""
    connection.execute(delete(AgreementRow))


def _hash(chain: Chain, lessons: Chain, last: int) -> str:
    """Of the versions up to `last`: a manifest's hash stands for the turns and lessons in it."""
    content = hashlib.sha256()
    for part in (chain, lessons):
        for one, ids in part:
            if one.version <= last:
                said = (one.version, one.parent_version, one.restores, one.manifest_hash, len(ids))
                content.update(repr(said).encode())
        content.update(b"\n")
    return content.hexdigest()
