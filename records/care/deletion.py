"""Deleting sessions and all that was derived from them, but nothing that another session needs.

Messages are shared between the sessions of a scope, and a turn's tokens may continue those of a
turn in another session. A message is deleted with the last turn whose path contains it; tokens that
others continue are written out there first. Only a session's id, the time and the reason remain, so
that nothing of it is written again, and so that backups that contain it can be named.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from sqlalchemy import (
    Connection,
    ScalarResult,
    bindparam,
    delete,
    exists,
    func,
    select,
    text,
    update,
)
from sqlalchemy.orm import aliased

from records.care.lineage import Reason, fed_from, lineage, note_deletions, settle
from records.care.rows import DeletionRow
from records.hints.memory import forget_turns
from records.lessons import forgetting
from records.names import DropReason, TurnState
from records.outcomes.rows import OutcomeRow, TurnValueRow
from records.search.indexing import forget_texts
from records.tables.loading import load_tokens
from records.tables.models import (
    ExpertsRow,
    FeedbackRow,
    NodeRow,
    RecordingRow,
    ReviewRow,
    SampleRow,
    ScoreRow,
    SessionRow,
    SessionVariantRow,
    SideSamplesRow,
    TokensRow,
    ToolsetRow,
    TurnRow,
    VariantRow,
    VerdictRow,
    VoteRow,
)
from records.tables.sql import chunks
from records.training.history.prompts import num_answers
from records.training.repeats import repeat_no_more

_OF_A_TURN = (
    *(SampleRow, ScoreRow, VoteRow, VerdictRow, ReviewRow, FeedbackRow),
    *(SideSamplesRow, ExpertsRow, RecordingRow, TokensRow, TurnValueRow),
)
_JUDGEMENT = (ScoreRow, VoteRow, VerdictRow, ReviewRow)
_DELETED = select(DeletionRow.session_id).where(DeletionRow.session_id == bindparam("session_id"))
NEWEST_NAMED = 4096
"""Number of newest sessions whose names are searched for the one that was meant."""
WRITING_LOCK = 7_203_115_064_981_238
"""PostgreSQL: shared by those that record turns, exclusive for those that delete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """What one deletion did. Pass rates no longer count `num_answers` of it. `versions`
    were trained on what it deleted (`records.care.lineage`).

    If there are `leased_by` (owners of leases), a step is being taken on turns of these sessions:
    nothing else of them can be leased any more, but they are not deleted yet.
    """

    num_sessions: int = 0
    num_turns: int = 0
    num_messages: int = 0
    num_lessons: int = 0
    num_answers: int = 0
    versions: tuple[int, ...] = ()
    leased_by: tuple[str, ...] = ()


def delete_sessions_op(
    connection: Connection, session_ids: Sequence[str], reason: Reason, now: float
) -> Deleted:
    """Delete these sessions, unless one of their turns is being trained on (see `Deleted`)."""
    _exclude_writers(connection)
    turn_ids = _turns_of(connection, session_ids)
    inside = set(turn_ids)
    fed = sorted({one for _, one in fed_from(connection, turn_ids) if one not in inside})
    leased_by = {
        *_stop_stages(connection, [*turn_ids, *fed], now),
        *forgetting.stop(connection, turn_ids, now),
    }
    if leased_by:
        return Deleted(leased_by=tuple(sorted(leased_by)))
    settle(connection)
    found = lineage(connection, session_ids)
    note_deletions(connection, session_ids, found, reason, now)
    num_lessons = forgetting.delete_lessons(connection, turn_ids)
    answers = num_answers(connection, [*turn_ids, *fed])
    _forget_feedback(connection, fed)
    _free_others(connection, turn_ids)
    path = _path_of(connection, turn_ids)
    toolsets = _toolsets_of(connection, turn_ids)
    forget_turns(connection, [*turn_ids, *fed], now)
    _delete_turns(connection, turn_ids)
    num_messages = _delete_nodes(connection, path)
    _delete_variants(connection, session_ids)
    _delete_toolsets(connection, toolsets)
    num_sessions = 0
    for part in chunks(session_ids):
        connection.execute(delete(OutcomeRow).where(OutcomeRow.session_id.in_(part)))
        gone = delete(SessionRow).where(SessionRow.session_id.in_(part))
        num_sessions += connection.execute(gone).rowcount
    return Deleted(
        num_sessions=num_sessions,
        num_turns=len(turn_ids),
        num_messages=num_messages,
        num_lessons=num_lessons,
        num_answers=answers,
        versions=tuple(sorted(found.all_versions)),
    )


def _exclude_writers(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITING_LOCK})
    else:
        # Otherwise freed pages keep their content.
        connection.execute(text("PRAGMA secure_delete=ON")).all()


def admit_writer(connection: Connection) -> None:
    """Call this before inserting turns: rows that they rely on are not deleted meanwhile."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock_shared(:key)"), {"key": WRITING_LOCK})


def _turns_of(connection: Connection, session_ids: Sequence[str]) -> list[str]:
    found: list[str] = []
    for part in chunks(session_ids):
        statement = select(TurnRow.turn_id).where(TurnRow.session_id.in_(part))
        found += connection.scalars(statement.order_by(TurnRow.turn_id).with_for_update())
    return found


def _stop_stages(connection: Connection, turn_ids: Sequence[str], now: float) -> list[str]:
    """Keep all stages from taking these turns; returns the owners of those being trained on."""
    owners: set[str] = set()
    for part in chunks(turn_ids):
        among = TurnRow.turn_id.in_(part)
        leased = select(TurnRow.claim_owner).where(among, TurnRow.state == TurnState.LEASED)
        owners.update(owner or "unknown" for owner in connection.scalars(leased))
        repeat_no_more(connection, among)
        kept = (TurnState.LEASED, TurnState.TRAINED, TurnState.DROPPED)
        connection.execute(
            update(TurnRow)
            .where(among, TurnRow.state.not_in(kept))
            .values(
                state=TurnState.DROPPED,
                drop_reason=DropReason.FORGOTTEN,
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        )
    return sorted(owners)


def _forget_feedback(connection: Connection, turn_ids: Sequence[str]) -> None:
    """Delete the next state of these turns and what was made of it, but not the turns."""
    for part in chunks(turn_ids):
        connection.execute(update(TurnRow).where(TurnRow.turn_id.in_(part)).values(next_state=None))
        for model in _JUDGEMENT:
            connection.execute(delete(model).where(model.turn_id.in_(part)))


def _free_others(connection: Connection, turn_ids: Sequence[str]) -> None:
    """Make turns of other sessions stop referring to these; their prompts stay the same."""
    inside = set(turn_ids)
    continuing: list[str] = []
    for part in chunks(turn_ids):
        after = select(TokensRow.turn_id).where(TokensRow.token_parent_id.in_(part))
        continuing += [one for one in connection.scalars(after) if one not in inside]
        connection.execute(
            update(TurnRow).where(TurnRow.parent_turn_id.in_(part)).values(parent_turn_id=None)
        )
    for part in chunks(continuing):
        tokens = load_tokens(connection, part)
        for turn_id in part:
            connection.execute(
                update(TokensRow)
                .where(TokensRow.turn_id == turn_id)
                .values(token_parent_id=None, num_shared_ids=0, prompt_ids=tokens[turn_id][0])
            )
    for part in chunks(turn_ids):
        connection.execute(
            update(TokensRow)
            .where(TokensRow.token_parent_id.in_(part))
            .values(token_parent_id=None)
        )


def _path_of(connection: Connection, turn_ids: Sequence[str]) -> dict[str, int]:
    """Every message on the paths of these turns: node id -> depth."""
    found: dict[str, int] = {}
    for part in chunks(turn_ids):
        walk = (
            select(NodeRow.node_id, NodeRow.parent_id, NodeRow.depth)
            .join(TurnRow, TurnRow.response_node_id == NodeRow.node_id)
            .where(TurnRow.turn_id.in_(part))
            .cte("walk", recursive=True)
        )
        above = select(NodeRow.node_id, NodeRow.parent_id, NodeRow.depth).join(
            walk, NodeRow.node_id == walk.c.parent_id
        )
        walk = walk.union(above)
        for node_id, depth in connection.execute(select(walk.c.node_id, walk.c.depth)):
            found[node_id] = depth
    return found


def _toolsets_of(connection: Connection, turn_ids: Sequence[str]) -> set[str]:
    """Hashes of the toolsets that these turns use."""
    found: set[str] = set()
    for part in chunks(turn_ids):
        used = select(TurnRow.toolset_hash).where(TurnRow.turn_id.in_(part))
        found.update(one for one in connection.scalars(used) if one is not None)
    return found


def _delete_turns(connection: Connection, turn_ids: Sequence[str]) -> None:
    forget_texts(connection, turn_ids)
    for part in chunks(turn_ids):
        for model in _OF_A_TURN:
            connection.execute(delete(model).where(model.turn_id.in_(part)))
    for part in chunks(turn_ids):
        connection.execute(delete(TurnRow).where(TurnRow.turn_id.in_(part)))


def _delete_nodes(connection: Connection, path: dict[str, int]) -> int:
    """Delete the messages that no turn needs; returns how many."""
    child = aliased(NodeRow)
    num_deleted = 0
    by_depth: dict[int, list[str]] = {}
    for node_id, depth in path.items():
        by_depth.setdefault(depth, []).append(node_id)
    for _, node_ids in sorted(by_depth.items(), reverse=True):
        for part in chunks(sorted(node_ids)):
            unused = delete(NodeRow).where(
                NodeRow.node_id.in_(part),
                ~exists().where(child.parent_id == NodeRow.node_id),
                ~exists().where(TurnRow.prompt_node_id == NodeRow.node_id),
                ~exists().where(TurnRow.response_node_id == NodeRow.node_id),
            )
            num_deleted += connection.execute(unused).rowcount
    _replace_forms(connection, path)
    return num_deleted


def _replace_forms(connection: Connection, path: dict[str, int]) -> None:
    """Give each message that stays the form in which a remaining turn has it.

    A node has the form that was seen first, which may be that of a deleted turn, with reasoning or
    an image that no other turn had.
    """
    for part in chunks(sorted(path)):
        stays = select(NodeRow.node_id, NodeRow.body_hash).where(NodeRow.node_id.in_(part))
        for node_id, body_hash in connection.execute(stays).all():
            form = _form_in_use(connection, node_id, body_hash, path[node_id])
            if form is not None:
                body = connection.execute(
                    select(VariantRow.body).where(VariantRow.body_hash == form)
                ).scalar_one()
                connection.execute(
                    update(NodeRow)
                    .where(NodeRow.node_id == node_id)
                    .values(body=body, body_hash=form)
                )


def _form_in_use(connection: Connection, node_id: str, own: str, depth: int) -> str | None:
    """None if a turn has the node's own form; else the form that one of its turns has."""
    form: str | None = None
    with closing(_turns_below(connection, node_id)) as turns:
        for variants in turns:
            form = (variants or {}).get(str(depth))
            if form in (None, own):
                return None
    return form


def _turns_below(
    connection: Connection, node_id: str
) -> Generator[dict[str, str] | None, None, None]:
    """`variants` of the turns whose path contains a message. Depth first, and only as far as the
    caller reads: all sessions of an agent may follow its system prompt.
    """
    open_rows: list[ScalarResult[str]] = []
    here: str | None = node_id
    try:
        while True:
            if here is None:
                open_rows.pop().close()
            else:
                turns = select(TurnRow.variants).where(TurnRow.response_node_id == here)
                yield from connection.scalars(turns).all()
                below = select(NodeRow.node_id).where(NodeRow.parent_id == here)
                open_rows.append(connection.scalars(below.execution_options(yield_per=100)))
            if not open_rows:
                return
            here = next(open_rows[-1], None)
    finally:
        for rows in open_rows:
            rows.close()


def _delete_variants(connection: Connection, session_ids: Sequence[str]) -> None:
    """Delete the forms that only turns of these sessions had."""
    hashes: set[str] = set()
    for part in chunks(session_ids):
        of_these = SessionVariantRow.session_id.in_(part)
        hashes.update(connection.scalars(select(SessionVariantRow.body_hash).where(of_these)))
        connection.execute(delete(SessionVariantRow).where(of_these))
    used = exists().where(SessionVariantRow.body_hash == VariantRow.body_hash)
    for part in chunks(sorted(hashes)):
        connection.execute(delete(VariantRow).where(VariantRow.body_hash.in_(part), ~used))


def _delete_toolsets(connection: Connection, hashes: Iterable[str]) -> None:
    for part in chunks(sorted(hashes)):
        connection.execute(
            delete(ToolsetRow).where(
                ToolsetRow.toolset_hash.in_(part),
                ~exists().where(TurnRow.toolset_hash == ToolsetRow.toolset_hash),
            )
        )


def is_deleted(connection: Connection, session_id: str) -> bool:
    """Whether a session of this id was deleted."""
    return connection.scalar(_DELETED, {"session_id": session_id}) is not None


def expired_sessions(connection: Connection, before: float, limit: int) -> list[str]:
    """Sessions not seen since `before` of which no turn or lesson is being trained on, oldest
    first.
    """
    leased = exists().where(
        TurnRow.session_id == SessionRow.session_id, TurnRow.state == TurnState.LEASED
    )
    statement = select(SessionRow.session_id).where(
        SessionRow.last_seen < before, ~leased, ~forgetting.is_leased(SessionRow.session_id)
    )
    return list(connection.scalars(statement.order_by(SessionRow.last_seen).limit(limit)))


def find_sessions(
    connection: Connection, *, session: str | None = None, user: str | None = None
) -> list[str]:
    """Sessions with this id or client-given name, and those with a turn of this user."""
    found: set[str] = set()
    if session is not None:
        for column in (SessionRow.session_id, SessionRow.external_id):
            found.update(connection.scalars(select(SessionRow.session_id).where(column == session)))
    if user is not None:
        found.update(
            connection.scalars(select(TurnRow.session_id).where(TurnRow.user_id == user).distinct())
        )
    return sorted(found)


def session_names(connection: Connection) -> list[str]:
    """Ids of the NEWEST_NAMED newest sessions, and the names that clients gave them."""
    newest = select(SessionRow.session_id, SessionRow.external_id)
    newest = newest.order_by(SessionRow.last_seen.desc()).limit(NEWEST_NAMED)
    rows = connection.execute(newest)
    return sorted({name for row in rows for name in row if name is not None})


def users(connection: Connection) -> list[str]:
    """All end users."""
    named = select(TurnRow.user_id).where(TurnRow.user_id.is_not(None)).distinct()
    return sorted(user for user in connection.scalars(named) if user is not None)


def response_nodes(connection: Connection, session_ids: Sequence[str]) -> set[str]:
    """The message nodes that turns of these sessions answered with."""
    found: set[str] = set()
    for part in chunks(session_ids):
        statement = select(TurnRow.response_node_id).where(TurnRow.session_id.in_(part))
        found.update(connection.scalars(statement))
    return found


def first_seen(connection: Connection, session_ids: Sequence[str]) -> float | None:
    """When the oldest of these sessions began (unix seconds)."""
    times = [
        connection.scalar(
            select(func.min(SessionRow.created_at)).where(SessionRow.session_id.in_(part))
        )
        for part in chunks(session_ids)
    ]
    return min((time for time in times if time is not None), default=None)
