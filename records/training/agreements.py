"""Up to which version a store was found equal to the chain of manifests.

What was equal once stays so: only steps, which make newer versions, and a trainer's start change
what trained. So a start compares only what is newer, if the chain still begins as it did then. A
manifest contains the hash of the one before it, so its newest version stands for all before. It
does not know how store and chain are compared (records/training/reconcile.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from sqlalchemy import BigInteger, Connection, Double, Text, delete, select
from sqlalchemy.orm import Mapped, mapped_column

from records.tables.models import Base
from records.tables.sql import upsert
from records.types import PolicyVersion

Chain = Sequence[tuple[PolicyVersion, Sequence[str]]]

_NUMBER = 1


class AgreementRow(Base):
    """The newest comparison, the only row; see `Agreement`. `link` identifies the chain up to
    `version`: its manifest contains the hash of the one before it.
    """

    __tablename__ = "agreements"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger)
    link: Mapped[str] = mapped_column(Text)
    agreed_at: Mapped[float] = mapped_column(Double)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Store and chain were equal up to `version`, at `agreed_at` (unix seconds)."""

    version: int
    agreed_at: float


def fitting(connection: Connection, chain: Chain, lessons: Chain) -> Agreement | None:
    """The newest comparison; None if there was none, or this chain begins differently."""
    row = connection.execute(select(AgreementRow.__table__)).one_or_none()
    if row is None or row.link != _link(chain, lessons, row.version):
        return None
    return Agreement(version=row.version, agreed_at=row.agreed_at)


def newer(chain: Chain, than: int | None) -> Chain:
    """The end of a chain after the version `than`; all of it for None."""
    if than is None:
        return chain
    after = list(takewhile(lambda link: link[0].version > than, reversed(chain)))
    return after[::-1]


def has(chain: Chain, version: int) -> bool:
    """Whether a chain has a version; it is not read through, as its versions ascend."""
    at = bisect_left(chain, version, key=lambda link: link[0].version)
    return at < len(chain) and chain[at][0].version == version


def agree(connection: Connection, chain: Chain, lessons: Chain, now: float) -> None:
    """Note that the store is equal to this chain."""
    if not chain:
        forget(connection)
        return
    last = chain[-1][0].version
    row = {
        "number": _NUMBER,
        "version": last,
        "link": _link(chain, lessons, last),
        "agreed_at": now,
    }
    upsert(connection, AgreementRow, [row])


def forget(connection: Connection) -> None:
    """Make the next start compare everything."""
    connection.execute(delete(AgreementRow))


def _link(chain: Chain, lessons: Chain, version: int) -> str:
    """What identifies both chains up to this version."""
    said: list[object] = []
    for part in (chain, lessons):
        number = len(part) - len(newer(part, version))
        said.append(number)
        if number:
            last, ids = part[number - 1]
            said += [last.version, last.parent_version, last.restores, last.manifest_hash, len(ids)]
    return ":".join(map(str, said))
