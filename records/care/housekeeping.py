"""Occasional work on a store: deletion, retention by age, the list of backups.

It works on an open store and needs no running application, so the endpoint's sweep and the command
line share it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select, text

from records.care import deletion
from records.care import lineage as of_sessions
from records.care.deletion import Deleted
from records.care.lineage import DeletedSession, Reason
from records.care.rows import BackupRow, DeletionRow
from records.lessons import steps
from records.names import TurnState
from records.search import parts
from records.store import Store
from records.tables.models import PolicyVersionRow, TurnRow
from records.tables.sql import table_of
from records.training import agreements
from records.types import PolicyVersion

logger = logging.getLogger(__name__)

_SESSIONS_PER_TRANSACTION = 50
_LEASE_POLL_S = 0.5
_LOG_ATTEMPTS, _LOG_PAUSE_S = 20, 0.1
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A backup that was taken; `location` as it was given, `created_at` in unix seconds."""

    backup_id: str
    location: str
    created_at: float


class Housekeeping:
    """Deletion and similar work on an open store."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    async def find_sessions(
        self, *, session: str | None = None, user: str | None = None
    ) -> list[str]:
        """Ids of the sessions with this id or client-given name, and of those of this user."""
        return await self._store.read(deletion.find_sessions, session=session, user=user)

    async def session_names(self) -> list[str]:
        """Ids of the newest sessions, and the names that clients gave them."""
        return await self._store.read(deletion.session_names)

    async def users(self) -> list[str]:
        """All end users."""
        return await self._store.read(deletion.users)

    async def response_nodes(self, session_ids: Sequence[str]) -> set[str]:
        """The message nodes that turns of these sessions answered with."""
        return await self._store.read(deletion.response_nodes, session_ids=session_ids)

    async def first_seen(self, session_ids: Sequence[str]) -> float | None:
        """When the oldest of these sessions began; None if none is stored."""
        return await self._store.read(deletion.first_seen, session_ids=session_ids)

    async def delete(
        self, session_ids: Sequence[str], reason: Reason, *, patience_s: float
    ) -> Deleted:
        """Delete sessions; waits up to `patience_s` for those that are being trained on.

        `leased_by` of the result names the owners that still train on what could not be deleted.
        """
        total = Deleted()
        for start in range(0, len(session_ids), _SESSIONS_PER_TRANSACTION):
            part = session_ids[start : start + _SESSIONS_PER_TRANSACTION]
            done = await self._delete_part(part, reason, patience_s)
            total = Deleted(
                num_sessions=total.num_sessions + done.num_sessions,
                num_turns=total.num_turns + done.num_turns,
                num_messages=total.num_messages + done.num_messages,
                num_lessons=total.num_lessons + done.num_lessons,
                num_answers=total.num_answers + done.num_answers,
                versions=tuple(sorted({*total.versions, *done.versions})),
                leased_by=tuple(sorted({*total.leased_by, *done.leased_by})),
            )
        if total.num_sessions:
            await self._clean_up()
        return total

    async def _delete_part(
        self, session_ids: Sequence[str], reason: Reason, patience_s: float
    ) -> Deleted:
        waited_s = 0.0
        while True:
            done = await self._store.write(
                deletion.delete_sessions_op,
                session_ids=session_ids,
                reason=reason,
                now=self._clock(),
            )
            if not done.leased_by or waited_s >= patience_s:
                return done
            await asyncio.sleep(_LEASE_POLL_S)
            waited_s += _LEASE_POLL_S

    async def _clean_up(self) -> None:
        """Remove old contents from the log (SQLite) and from the tables (PostgreSQL)."""
        if not self._store.config.is_sqlite:
            await self._store.vacuum()
            return
        while await self._store.write(parts.shrink_op):
            pass
        for _ in range(_LOG_ATTEMPTS):
            if await self._store.read(_truncate_log):
                return
            await asyncio.sleep(_LOG_PAUSE_S)
        logger.warning(
            "others read the database: its log contains deleted rows until they are done"
        )

    async def finish_deletions(self) -> None:
        """Remove what deletions left in the index of texts and the log, where the process that
        deleted ended before that.
        """
        config = self._store.config
        if config.is_sqlite and await self._store.read(parts.has_deleted):
            await self._clean_up()

    async def expire(self, max_age_days: float) -> Deleted:
        """Delete the sessions not seen for `max_age_days`; those being trained on stay."""
        before = self._clock() - max_age_days * _DAY_S
        session_ids = await self._store.read(deletion.expired_sessions, before=before, limit=10_000)
        return await self.delete(session_ids, "retention", patience_s=0.0)

    async def trained_on(self, session_ids: Sequence[str]) -> list[int]:
        """The policy versions that were trained on these stored sessions."""
        found = await self._store.read(of_sessions.lineage, session_ids=session_ids)
        return sorted(found.all_versions)

    async def deleted_sessions(
        self, *, session: str | None = None, user: str | None = None
    ) -> list[DeletedSession]:
        """Deleted sessions with this id or client-given name, and those of this user."""
        return await self._store.read(of_sessions.deleted_sessions, session=session, user=user)

    async def versions_built_on(self, versions: Sequence[int]) -> list[int]:
        """These policy versions and all that descend from them."""
        return await self._store.read(_descendants, versions=versions)

    async def versions(self) -> dict[int, PolicyVersion]:
        """All policy versions by their number."""
        return await self._store.read(_versions)

    async def trained_turns(self) -> dict[str, int]:
        """Turn id -> the version that trained it."""
        return await self._store.read(_trained_turns)

    async def trained_lessons(self) -> dict[str, int]:
        """Lesson id -> the version that trained it."""
        return await self._store.read(steps.trained)

    async def compare_all_at_start(self) -> None:
        """Make the next start of a trainer compare everything with the manifests, not only what is
        newer than the last comparison.
        """
        await self._store.write(agreements.forget)

    async def has_deletions(self) -> bool:
        """Whether anything was ever deleted."""
        return await self._store.read(_has_deletions)

    async def backups(self) -> list[Backup]:
        """All backups that were taken of this store, oldest first."""
        return await self._store.read(_backups)

    async def note_backup(self, backup: Backup) -> None:
        """Remember a backup that is about to be taken."""
        await self._store.write(_note_backup_op, backup=backup)

    async def forget_backup(self, backup_id: str) -> None:
        """Remove a backup from the list: it was not taken after all, or no longer exists."""
        await self._store.write(_forget_backup_op, backup_id=backup_id)


def _truncate_log(connection: Connection) -> bool:
    """Empty the log; False if a reader that looks at an earlier moment still needs it."""
    is_busy, _, _ = connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)")).one()
    return not is_busy


def _backups(connection: Connection) -> list[Backup]:
    statement = select(table_of(BackupRow)).order_by(BackupRow.created_at)
    return [Backup(**row._mapping) for row in connection.execute(statement)]


def _note_backup_op(connection: Connection, backup: Backup) -> None:
    connection.execute(insert(BackupRow), asdict(backup))


def _forget_backup_op(connection: Connection, backup_id: str) -> None:
    connection.execute(delete(BackupRow).where(BackupRow.backup_id == backup_id))


def _has_deletions(connection: Connection) -> bool:
    return connection.scalar(select(DeletionRow.session_id).limit(1)) is not None


def _versions(connection: Connection) -> dict[int, PolicyVersion]:
    rows = connection.execute(select(table_of(PolicyVersionRow)))
    return {row.version: PolicyVersion(**row._mapping) for row in rows}


def _trained_turns(connection: Connection) -> dict[str, int]:
    trained = select(TurnRow.turn_id, TurnRow.trained_version).where(
        TurnRow.state == TurnState.TRAINED, TurnRow.trained_version.is_not(None)
    )
    return {turn_id: version for turn_id, version in connection.execute(trained) if version}


def _descendants(connection: Connection, versions: Sequence[int]) -> list[int]:
    rows = connection.execute(
        select(PolicyVersionRow.version, PolicyVersionRow.parent_version).order_by(
            PolicyVersionRow.version
        )
    )
    found = set(versions)
    for version, parent in rows:  # a parent has a smaller number
        if parent in found:
            found.add(version)
    return sorted(found)
