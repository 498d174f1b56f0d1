"""Which versions of the policy were trained on a session, stored or deleted.

A version was trained on a session if it trained on one of its turns, on feedback from one, on a
lesson that was sampled at one, or on a lesson of a hint that came from one. When the session is
deleted, the numbers stay with its id. Its names stay as digests, so that whoever knows a name can
ask again. Versions that descend from others are found in the list of versions.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.orm import aliased

from records.care.rows import DeletionRow
from records.hints.ending import versions_of_lessons
from records.hints.rows import HintRow, HintSourceRow
from records.lessons import forgetting
from records.lessons.names import LessonState
from records.lessons.rows import LessonRow, LessonSampleRow
from records.messages import Message, fingerprint
from records.tables.loading import load_turns
from records.tables.models import SampleRow, SessionRow, TurnRow
from records.tables.sql import chunks

Reason = Literal["forget", "retention"]
NameKind = Literal["session", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Versions that were trained on sessions, by session id; and lessons of their hints, sampled in
    other sessions, on which a step is being taken now.
    """

    versions: Mapping[str, Set[int]]
    pending: Mapping[str, Set[str]]

    @property
    def all_versions(self) -> set[int]:
        """The versions of all the sessions."""
        return set().union(*self.versions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedSession:
    """A deleted session; `deleted_at` in unix seconds. `versions` is None if the program that
    deleted it did not keep them. `is_settled` is false while a step is being taken on a lesson of a
    hint that came from it.
    """

    session_id: str
    deleted_at: float
    reason: str
    versions: tuple[int, ...] | None
    is_settled: bool


def lineage(connection: Connection, session_ids: Sequence[str]) -> Lineage:
    """The lineage of stored sessions; an unknown one has no versions."""
    own = {
        row.turn_id: row.session_id
        for part in chunks(session_ids)
        for row in connection.execute(
            select(TurnRow.turn_id, TurnRow.session_id).where(TurnRow.session_id.in_(part))
        )
    }
    owners: dict[str, set[str]] = {turn_id: {session} for turn_id, session in own.items()}
    for child, above in fed_from(connection, list(own)):
        owners.setdefault(above, set()).add(own[child])
    versions: dict[str, set[int]] = {session_id: set() for session_id in session_ids}
    found = [
        *_of_turns(connection, list(owners)),
        *forgetting.versions(connection, list(own)),
    ]
    for turn_id, version in found:
        for session_id in owners[turn_id]:
            versions[session_id].add(version)
    pending: dict[str, set[str]] = {session_id: set() for session_id in session_ids}
    for hint_id, sessions in _hints_of(connection, owners).items():
        taught = versions_of_lessons(connection, [hint_id])
        taught |= _since_when(connection, hint_id, owners.keys())
        leased = _leased_lessons(connection, hint_id)
        for session_id in sessions:
            versions[session_id] |= taught
            pending[session_id] |= leased
    return Lineage(versions=versions, pending=pending)


def fed_from(connection: Connection, turn_ids: Sequence[str]) -> list[tuple[str, str]]:
    """(turn, turn of another session) pairs: the next state of the second came with the request of
    the first, which is one of `turn_ids`.
    """
    parent = aliased(TurnRow)
    pairs: list[tuple[str, str, list[Message]]] = []
    for part in chunks(turn_ids):
        statement = (
            select(TurnRow.turn_id, parent.turn_id, parent.next_state)
            .join(parent, parent.turn_id == TurnRow.parent_turn_id)
            .where(
                TurnRow.turn_id.in_(part),
                parent.next_state.is_not(None),
                parent.session_id != TurnRow.session_id,
            )
        )
        rows = connection.execute(statement)
        pairs += [(child, above, state or []) for child, above, state in rows]
    if not pairs:
        return []
    children = load_turns(connection, list(dict.fromkeys(child for child, _, _ in pairs)))
    messages = {turn.turn_id: turn.messages for turn in children}
    return [(child, above) for child, above, state in pairs if _ends_with(messages[child], state)]


def _ends_with(messages: Sequence[Message], next_state: Sequence[Message]) -> bool:
    tail = messages[len(messages) - len(next_state) :]
    return [fingerprint(one) for one in tail] == [fingerprint(one) for one in next_state]


def _of_turns(connection: Connection, turn_ids: Sequence[str]) -> list[tuple[str, int]]:
    """(turn, version that trained on it), lost versions included."""
    found: list[tuple[str, int]] = []
    for part in chunks(turn_ids):
        sampled = select(SampleRow.turn_id, SampleRow.version).where(SampleRow.turn_id.in_(part))
        trained = select(TurnRow.turn_id, TurnRow.trained_version).where(
            TurnRow.turn_id.in_(part), TurnRow.trained_version.is_not(None)
        )
        for statement in (sampled, trained):
            found += [(turn_id, number) for turn_id, number in connection.execute(statement)]
    return found


def _hints_of(connection: Connection, owners: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """The hints that any of these turns gave -> the sessions of those turns."""
    found: dict[str, set[str]] = defaultdict(set)
    for part in chunks(list(owners)):
        sources = select(HintSourceRow.hint_id, HintSourceRow.turn_id).where(
            HintSourceRow.turn_id.in_(part)
        )
        origins = select(HintRow.hint_id, HintRow.origin_turn_id).where(
            HintRow.origin_turn_id.in_(part)
        )
        for statement in (sources, origins):
            for hint_id, turn_id in connection.execute(statement):
                found[hint_id] |= owners[turn_id]
    return found


def _since_when(connection: Connection, hint_id: str, turn_ids: Collection[str]) -> set[int]:
    """The first version that trained on a hint, if it came only from these turns."""
    sources = select(HintSourceRow.turn_id).where(HintSourceRow.hint_id == hint_id)
    if any(turn_id not in turn_ids for turn_id in connection.scalars(sources)):
        return set()
    since = connection.scalar(select(HintRow.trained_since).where(HintRow.hint_id == hint_id))
    return set() if since is None else {since}


def _leased_lessons(connection: Connection, hint_id: str) -> set[str]:
    leased = select(LessonRow.lesson_id).where(
        LessonRow.hint_id == hint_id, LessonRow.state == LessonState.LEASED
    )
    return set(connection.scalars(leased))


def note_deletions(
    connection: Connection,
    session_ids: Sequence[str],
    found: Lineage,
    reason: Reason,
    now: float,
) -> None:
    """Note what is kept of sessions that are about to be deleted. If one was deleted before and
    came back with a backup, what was known of it is kept.
    """
    names = _names(connection, session_ids)
    for part in chunks(session_ids):
        before = {
            row.session_id: row
            for row in connection.execute(
                select(DeletionRow.__table__).where(DeletionRow.session_id.in_(part))
            )
        }
        connection.execute(delete(DeletionRow).where(DeletionRow.session_id.in_(part)))
        rows = []
        for one in part:
            old = before.get(one)
            versions = {*found.versions[one], *((old and old.versions) or ())}
            pending = {*found.pending[one], *((old and old.pending_lessons) or ())}
            known = {*names[one], *((old and old.name_digests) or ())}
            rows.append(
                {
                    "session_id": one,
                    "deleted_at": now,
                    "reason": reason,
                    "versions": sorted(versions),
                    "pending_lessons": sorted(pending) or None,
                    "name_digests": sorted(known) or None,
                }
            )
        connection.execute(insert(DeletionRow), rows)


def settle(connection: Connection) -> None:
    """Add to past deletions the versions of steps that were being taken then and are over now. Call
    this before lessons are deleted, because their rows tell what trained on them.
    """
    waiting = select(
        DeletionRow.session_id, DeletionRow.versions, DeletionRow.pending_lessons
    ).where(DeletionRow.pending_lessons.is_not(None))
    for session_id, versions, pending in connection.execute(waiting).all():
        trained, left = _outcome(connection, pending or ())
        connection.execute(
            update(DeletionRow)
            .where(DeletionRow.session_id == session_id)
            .values(
                versions=sorted({*(versions or ()), *trained}),
                pending_lessons=sorted(left) or None,
            )
        )


def _outcome(connection: Connection, lesson_ids: Sequence[str]) -> tuple[set[int], set[str]]:
    """(versions that trained on these lessons, those on which a step is still being taken)."""
    versions: set[int] = set()
    leased: set[str] = set()
    for part in chunks(lesson_ids):
        sampled = select(LessonSampleRow.version).where(LessonSampleRow.lesson_id.in_(part))
        versions.update(connection.scalars(sampled))
        rows = select(LessonRow.lesson_id, LessonRow.trained_version, LessonRow.state)
        for lesson_id, version, state in connection.execute(
            rows.where(LessonRow.lesson_id.in_(part))
        ):
            if version is not None:
                versions.add(version)
            if state is LessonState.LEASED:
                leased.add(lesson_id)
    return versions, leased


def deleted_sessions(
    connection: Connection, *, session: str | None = None, user: str | None = None
) -> list[DeletedSession]:
    """Deleted sessions with this id or client-given name, and those of this user."""
    found: list[str] = []
    # A digest includes its session's id, so each is compared.
    rows = connection.execute(select(DeletionRow.session_id, DeletionRow.name_digests))
    for session_id, digests in rows:
        wanted: set[str] = set()
        if session is not None:
            wanted.add(_digest(session_id, "session", session))
        if user is not None:
            wanted.add(_digest(session_id, "user", user))
        if session_id == session or not wanted.isdisjoint(digests or ()):
            found.append(session_id)
    return [_deleted(connection, session_id) for session_id in sorted(found)]


def _deleted(connection: Connection, session_id: str) -> DeletedSession:
    row = connection.execute(
        select(DeletionRow.__table__).where(DeletionRow.session_id == session_id)
    ).one()
    trained, left = _outcome(connection, row.pending_lessons or ())
    known = row.versions
    return DeletedSession(
        session_id=session_id,
        deleted_at=row.deleted_at,
        reason=row.reason,
        versions=None if known is None else tuple(sorted({*known, *trained})),
        is_settled=not left,
    )


def _names(connection: Connection, session_ids: Sequence[str]) -> dict[str, set[str]]:
    """Digests of the names that clients gave these sessions and their users."""
    found: dict[str, set[str]] = {session_id: set() for session_id in session_ids}
    for part in chunks(session_ids):
        named = select(SessionRow.session_id, SessionRow.external_id).where(
            SessionRow.session_id.in_(part), SessionRow.external_id.is_not(None)
        )
        users = select(TurnRow.session_id, TurnRow.user_id).where(
            TurnRow.session_id.in_(part), TurnRow.user_id.is_not(None)
        )
        for session_id, name in connection.execute(named):
            found[session_id].add(_digest(session_id, "session", name or ""))
        for session_id, name in connection.execute(users.distinct()):
            found[session_id].add(_digest(session_id, "user", name or ""))
    return found


def _digest(session_id: str, kind: NameKind, name: str) -> str:
    return hashlib.sha256(f"{session_id}\0{kind}\0{name}".encode()).hexdigest()
