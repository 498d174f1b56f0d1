"""Making the store equal to the chain of surviving checkpoints, when a trainer starts.

A checkpoint becomes real when its folder is renamed, before the store hears of it; and checkpoints
may be lost after the store heard of them. The manifests decide. It knows manifests only as
(version, turn ids) and (version, lesson ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, exists, insert, or_, select, update

from records.errors import StoreConflict
from records.hints.ending import drop_turns
from records.hints.versions import recount
from records.lessons import steps
from records.names import DropReason, TurnState
from records.tables.models import PolicyVersionRow, ScoreRow, TurnRow, VerdictRow
from records.tables.sql import chunks
from records.training.training import release_all_op, version_row
from records.types import PolicyVersion

Chain = Sequence[tuple[PolicyVersion, Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileReport:
    """What `reconcile` changed. `unknown_turns` and `unknown_lessons` are on the chain but not in
    this store; lessons that only lost checkpoints trained are dropped.
    """

    versions_added: tuple[int, ...]
    versions_abandoned: tuple[int, ...]
    turns_returned: int
    turns_marked_trained: int
    leases_released: int
    unknown_turns: tuple[str, ...]
    lessons_dropped: int
    lessons_marked_trained: int
    unknown_lessons: tuple[str, ...]


def trained_on_chain(chain: Chain) -> dict[str, int]:
    """Id of a turn (or lesson) -> the version that trained it. Raises StoreConflict if one was
    trained twice.
    """
    trained: dict[str, int] = {}
    for version, turn_ids in chain:
        for turn_id in turn_ids:
            if turn_id in trained:
                raise StoreConflict(
                    f"turn {turn_id} was trained twice: "
                    f"in versions {trained[turn_id]} and {version.version}"
                )
            trained[turn_id] = version.version
    return trained


def reconcile_op(
    connection: Connection, chain: Chain, lessons: Chain, now: float
) -> ReconcileReport:
    """Versions, trained turns and lessons as on the chain; every other trained or leased turn and
    every other leased lesson -> ready.
    """
    on_chain, lessons_on_chain = trained_on_chain(chain), trained_on_chain(lessons)
    added, abandoned = _reconcile_versions(connection, [version for version, _ in chain])
    released = release_all_op(connection, now)
    in_store: dict[str, int | None] = {
        row.turn_id: row.trained_version
        for row in connection.execute(
            select(TurnRow.turn_id, TurnRow.trained_version).where(
                TurnRow.state == TurnState.TRAINED
            )
        )
    }
    returned = [turn_id for turn_id in in_store if turn_id not in on_chain]
    for part in chunks(returned):
        again = TurnRow.turn_id.in_(part)
        drop_turns(connection, now, again)
        # What taught it may have been deleted since (records/care/deletion.py).
        taught = or_(
            exists().where(ScoreRow.turn_id == TurnRow.turn_id),
            exists().where(
                VerdictRow.turn_id == TurnRow.turn_id,
                or_(VerdictRow.reward.is_not(None), VerdictRow.awaits_outcome),
            ),
        )
        connection.execute(
            update(TurnRow)
            .where(again, TurnRow.state == TurnState.TRAINED, ~taught)
            .values(
                state=TurnState.DROPPED,
                drop_reason=DropReason.FORGOTTEN,
                trained_version=None,
                updated_at=now,
            )
        )
        connection.execute(
            update(TurnRow)
            .where(again, taught, TurnRow.state == TurnState.TRAINED)
            .values(state=TurnState.READY, trained_version=None, updated_at=now)
        )
    marked, unknown = _mark_trained(
        connection,
        {turn: version for turn, version in on_chain.items() if in_store.get(turn) != version},
        now,
    )
    dropped, lessons_marked, unknown_lessons = steps.reconcile(connection, lessons_on_chain, now)
    recount(connection, [version.version for version, _ in chain])
    return ReconcileReport(
        versions_added=tuple(added),
        versions_abandoned=tuple(abandoned),
        turns_returned=len(returned),
        turns_marked_trained=marked,
        leases_released=released,
        unknown_turns=tuple(unknown),
        lessons_dropped=dropped,
        lessons_marked_trained=lessons_marked,
        unknown_lessons=tuple(unknown_lessons),
    )


def _reconcile_versions(
    connection: Connection, survivors: list[PolicyVersion]
) -> tuple[list[int], list[int]]:
    """Returns (versions inserted, versions newly abandoned). Version 0, the start, survives."""
    stored = {row.version: row for row in connection.execute(select(PolicyVersionRow.__table__))}
    added, revived = [], []
    for version in survivors:
        row = stored.get(version.version)
        if row is None:
            connection.execute(insert(PolicyVersionRow), version_row(version))
            added.append(version.version)
        elif row.manifest_hash != version.manifest_hash:
            raise StoreConflict(
                f"version {version.version} has manifest {version.manifest_hash}, "
                f"but the store knows it with {row.manifest_hash}"
            )
        elif row.abandoned:
            revived.append(version.version)
    alive = {version.version for version in survivors} | {0}
    abandoned = [number for number, row in stored.items() if number not in alive]
    newly = sorted(number for number in abandoned if not stored[number].abandoned)
    _set_abandoned(connection, newly, True)
    _set_abandoned(connection, revived, False)
    return added, newly


def _set_abandoned(connection: Connection, versions: list[int], abandoned: bool) -> None:
    for part in chunks(versions):
        connection.execute(
            update(PolicyVersionRow)
            .where(PolicyVersionRow.version.in_(part))
            .values(abandoned=abandoned)
        )


def _mark_trained(
    connection: Connection, trained: dict[str, int], now: float
) -> tuple[int, list[str]]:
    """These turns -> trained, whatever their state; returns (number marked, unknown turn ids)."""
    unknown = []
    for turn_id, version in trained.items():
        changed = connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id == turn_id)
            .values(
                state=TurnState.TRAINED,
                drop_reason=None,
                drop_detail=None,
                trained_version=version,
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        )
        if changed.rowcount != 1:
            unknown.append(turn_id)
    return len(trained) - len(unknown), unknown
