"""Making the store equal to the chain of surviving checkpoints, when a trainer starts.

A checkpoint becomes real when its folder is renamed, before the store is told; and checkpoints may
be lost after the store was told. The manifests decide. It knows manifests only as (version, turn
ids) and (version, lesson ids).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, insert, select, update

from records.errors import StoreConflict
from records.hints.ending import drop_turns, only_ended
from records.hints.versions import recount
from records.lessons import steps
from records.names import DropReason, TurnState
from records.tables.models import PolicyVersionRow, TurnRow
from records.tables.sql import chunks
from records.training.repeats import is_taught, repeat_no_more
from records.training.training import release_all_op, version_row
from records.types import PolicyVersion

Chain = Sequence[tuple[PolicyVersion, Sequence[str]]]


class Trained(NamedTuple):
    """The newest version that trained a turn or lesson, and how many did."""

    version: int
    times: int


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


def trained_on_chain(chain: Chain, repeated: Set[str] = frozenset()) -> dict[str, Trained]:
    """What trained each turn (or lesson). Raises StoreConflict if one that is not `repeated` was
    trained twice.
    """
    trained: dict[str, Trained] = {}
    for version, turn_ids in chain:
        for turn_id in turn_ids:
            before = trained.get(turn_id)
            if before is not None and turn_id not in repeated:
                raise StoreConflict(
                    f"turn {turn_id} was trained twice: "
                    f"in versions {before.version} and {version.version}"
                )
            trained[turn_id] = Trained(version.version, 1 if before is None else before.times + 1)
    return trained


def reconcile_op(
    connection: Connection,
    chain: Chain,
    lessons: Chain,
    now: float,
    repeated: Set[str] = frozenset(),
    replay_times: int = 1,
) -> ReconcileReport:
    """Make versions, trained turns and lessons match the chain; every other trained or leased turn
    and every other leased lesson -> ready. A turn may train until it has `replay_times`; `repeated`
    are those that trained more than once.
    """
    on_chain, lessons_on_chain = trained_on_chain(chain, repeated), trained_on_chain(lessons)
    added, abandoned = _reconcile_versions(connection, [version for version, _ in chain])
    released = release_all_op(connection, now)
    in_store: dict[str, tuple[int | None, int]] = {
        row.turn_id: (row.trained_version, row.times_trained)
        for row in connection.execute(
            select(TurnRow.turn_id, TurnRow.trained_version, TurnRow.times_trained).where(
                TurnRow.state == TurnState.TRAINED
            )
        )
    }
    returned = [turn_id for turn_id in in_store if turn_id not in on_chain]
    for part in chunks(returned):
        again = TurnRow.turn_id.in_(part)
        drop_turns(connection, now, again)
        untrained = {"trained_version": None, "times_trained": 0, "times_left": 0}
        # What it was taught by may have been deleted since (records/care/deletion.py).
        taught = is_taught(TurnRow)
        connection.execute(
            update(TurnRow)
            .where(again, TurnRow.state == TurnState.TRAINED, ~taught)
            .values(
                state=TurnState.DROPPED,
                drop_reason=DropReason.FORGOTTEN,
                **untrained,
                updated_at=now,
            )
        )
        connection.execute(
            update(TurnRow)
            .where(again, taught, TurnRow.state == TurnState.TRAINED)
            .values(state=TurnState.READY, **untrained, updated_at=now)
        )
    differing = {turn: found for turn, found in on_chain.items() if in_store.get(turn) != found}
    marked, unknown = _mark_trained(connection, differing, replay_times, now)
    _end_repeats(connection, [version for version, _ in chain])
    dropped, lessons_marked, unknown_lessons = steps.reconcile(
        connection, {one: found.version for one, found in lessons_on_chain.items()}, now
    )
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
                f"but the store has it with {row.manifest_hash}"
            )
        elif row.abandoned:
            revived.append(version.version)
    alive = {version.version for version in survivors} | {0}
    abandoned = [number for number, row in stored.items() if number not in alive]
    newly = sorted(number for number in abandoned if not stored[number].abandoned)
    _set_abandoned(connection, newly, True)
    _set_abandoned(connection, revived, False)
    return added, newly


def _end_repeats(connection: Connection, survivors: list[PolicyVersion]) -> None:
    """What a rollback withdrew and what ended hints taught trains no more."""
    repeat_no_more(connection, only_ended())
    for version in survivors:
        if version.restores is not None:
            withdrawn = TurnRow.trained_version.between(version.restores + 1, version.version - 1)
            repeat_no_more(connection, withdrawn)


def _set_abandoned(connection: Connection, versions: list[int], abandoned: bool) -> None:
    for part in chunks(versions):
        connection.execute(
            update(PolicyVersionRow)
            .where(PolicyVersionRow.version.in_(part))
            .values(abandoned=abandoned)
        )


def _mark_trained(
    connection: Connection, trained: dict[str, Trained], replay_times: int, now: float
) -> tuple[int, list[str]]:
    """These turns -> trained, whatever their state; returns (number marked, unknown turn ids)."""
    unknown = []
    for turn_id, (version, times) in trained.items():
        changed = connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id == turn_id)
            .values(
                state=TurnState.TRAINED,
                drop_reason=None,
                drop_detail=None,
                trained_version=version,
                times_trained=times,
                times_left=max(0, replay_times - times),
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        )
        if changed.rowcount != 1:
            unknown.append(turn_id)
    return len(trained) - len(unknown), unknown
