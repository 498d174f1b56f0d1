"""Making the store equal to the chain of surviving checkpoints, when a trainer starts.

A checkpoint becomes real when its folder is renamed, before the store is told; and checkpoints may
be lost after the store was told. The manifests decide. It knows manifests only as (version, turn
ids) and (version, lesson ids).

Only what is newer than the last comparison is compared (records/training/agreements.py), as long as
nothing of it was lost and the chain begins as it did then; otherwise everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection, insert, select, update

from records.errors import StoreConflict
from records.hints import versions as hint_versions
from records.hints.ending import drop_turns, only_ended
from records.lessons import steps
from records.names import DropReason, TurnState
from records.tables.models import PolicyVersionRow, TurnRow
from records.tables.sql import chunks
from records.training import agreements
from records.training.agreements import Agreement, Chain
from records.training.repeats import is_taught, repeat_no_more
from records.training.training import release_all_op, version_row
from records.types import PolicyVersion


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What the versions after `since` (None: all) trained, as the chain and as the store say it."""

    since: int | None
    on_chain: Mapping[str, Trained]
    in_store: Mapping[str, tuple[int | None, int]]
    lessons_on_chain: Mapping[str, Trained]
    lessons_in_store: Mapping[str, int]

    @property
    def lost(self) -> list[str]:
        """Turns that the store has as trained, and the chain has not."""
        return [one for one in self.in_store if one not in self.on_chain]

    @property
    def lost_lessons(self) -> list[str]:
        """The same for lessons."""
        return [one for one in self.lessons_in_store if one not in self.lessons_on_chain]

    @property
    def differing(self) -> dict[str, Trained]:
        """Turns of the chain that the store has otherwise."""
        return {one: at for one, at in self.on_chain.items() if self.in_store.get(one) != at}

    @property
    def differing_lessons(self) -> dict[str, int]:
        """The same for lessons."""
        return {
            one: at.version
            for one, at in self.lessons_on_chain.items()
            if self.lessons_in_store.get(one) != at.version
        }


def trained_on_chain(
    chain: Chain, repeated: Set[str] = frozenset(), before: Mapping[str, int] | None = None
) -> dict[str, Trained]:
    """What trained each turn (or lesson); `before` the chain, some trained so often. Raises
    StoreConflict if one that is not `repeated` was trained twice.
    """
    trained: dict[str, Trained] = {}
    times = Counter(before or {})
    for version, turn_ids in chain:
        for turn_id in turn_ids:
            if turn_id in trained and turn_id not in repeated:
                raise StoreConflict(
                    f"turn {turn_id} was trained twice: "
                    f"in versions {trained[turn_id].version} and {version.version}"
                )
            times[turn_id] += 1
            trained[turn_id] = Trained(version.version, times[turn_id])
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
    released = release_all_op(connection, now)
    agreed = agreements.fitting(connection, chain, lessons)
    compared = None if agreed is None else _newer(connection, chain, lessons, repeated, agreed)
    if compared is None:
        agreed = None
        compared = _compare(connection, chain, lessons, repeated, None)
    newer = [version for version, _ in agreements.newer(chain, compared.since)]
    added, abandoned = _reconcile_versions(connection, newer, compared.since)
    lost, differing = compared.lost, compared.differing
    _give_back(connection, lost, now)
    marked, unknown = _mark_trained(connection, differing, replay_times, now)
    _end_repeats(connection, newer)
    lost_lessons, differing_lessons = compared.lost_lessons, compared.differing_lessons
    lessons_marked, unknown_lessons = steps.reconcile(
        connection, lost_lessons, differing_lessons, now
    )
    hints = None
    if agreed is not None and not abandoned:
        hints = hint_versions.changed_since(connection, agreed.agreed_at)
        hints |= hint_versions.of_turns(connection, list(differing))
        hints |= steps.hints_of(connection, list(differing_lessons))
    hint_versions.recount(connection, partial(agreements.has, chain), hints)
    agreements.agree(connection, chain, lessons, now)
    return ReconcileReport(
        versions_added=tuple(added),
        versions_abandoned=tuple(abandoned),
        turns_returned=len(lost),
        turns_marked_trained=marked,
        leases_released=released,
        unknown_turns=tuple(unknown),
        lessons_dropped=len(lost_lessons),
        lessons_marked_trained=lessons_marked,
        unknown_lessons=tuple(unknown_lessons),
    )


def _newer(
    connection: Connection, chain: Chain, lessons: Chain, repeated: Set[str], agreed: Agreement
) -> _Compared | None:
    """What is newer than the agreement; None if that is not enough: a version was lost, so that a
    turn may be where an older one left it, or something was trained before and after.
    """
    found = _compare(connection, chain, lessons, repeated, agreed.version)
    once = [one for one in found.differing if one not in repeated]
    trained_before = _trained_by(connection, once, agreed.version) or steps.trained_by(
        connection, list(found.differing_lessons), agreed.version
    )
    return None if found.lost or found.lost_lessons or trained_before else found


def _compare(
    connection: Connection, chain: Chain, lessons: Chain, repeated: Set[str], since: int | None
) -> _Compared:
    newer = agreements.newer(chain, since)
    before: Counter[str] = Counter()
    again = {one for _, ids in newer for one in ids if one in repeated}
    if again and since is not None:
        older = (ids for _, ids in chain[: len(chain) - len(newer)])
        before.update(one for ids in older for one in ids if one in again)
    return _Compared(
        since=since,
        on_chain=trained_on_chain(newer, repeated, before),
        in_store=_trained_since(connection, since),
        lessons_on_chain=trained_on_chain(agreements.newer(lessons, since)),
        lessons_in_store=steps.trained(connection, since),
    )


def _trained_since(connection: Connection, since: int | None) -> dict[str, tuple[int | None, int]]:
    """Trained turns: the version, and how many trained it."""
    statement = select(
        TurnRow.turn_id, TurnRow.trained_version, TurnRow.times_trained, TurnRow.state
    )
    # With a condition on the state too, SQLite reads all trained turns.
    among = TurnRow.state == TurnState.TRAINED if since is None else TurnRow.trained_version > since
    return {
        row.turn_id: (row.trained_version, row.times_trained)
        for row in connection.execute(statement.where(among))
        if row.state is TurnState.TRAINED
    }


def _trained_by(connection: Connection, turn_ids: Sequence[str], version: int) -> bool:
    """Whether one of these turns was trained by this version or an older one."""
    found = select(TurnRow.turn_id).where(
        TurnRow.state == TurnState.TRAINED, TurnRow.trained_version <= version
    )
    return any(
        connection.scalar(found.where(TurnRow.turn_id.in_(part)).limit(1)) is not None
        for part in chunks(turn_ids)
    )


def _give_back(connection: Connection, lost: Sequence[str], now: float) -> None:
    """Turns that only lost checkpoints trained -> ready, or dropped if nothing teaches them."""
    for part in chunks(lost):
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


def _reconcile_versions(
    connection: Connection, survivors: list[PolicyVersion], since: int | None
) -> tuple[list[int], list[int]]:
    """Of versions after `since` (None: of all), returns (those inserted, those newly abandoned).
    Version 0, the start, survives.
    """
    statement = select(PolicyVersionRow.__table__)
    if since is not None:
        statement = statement.where(PolicyVersionRow.version > since)
    stored = {row.version: row for row in connection.execute(statement)}
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
