"""Reading the hint memory, and the recorded states at which its hints may be rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select, tuple_

from records.hints.likeness import likeness, overlap, words_of
from records.hints.rows import HintPromptRow, HintRow, HintSourceRow, HintStateRow
from records.hints.types import (
    LIVE_STATUSES,
    Hint,
    HintPrompt,
    HintSource,
    HintState,
    HintStatus,
    RehearsalBlock,
)
from records.messages import content_text
from records.names import DropReason, TurnState, TurnType
from records.queue.round_robin import HINT_ONLY_PRIORITY, PRIORITIES
from records.tables.models import IS_HELD_OUT, NodeRow, TokensRow, TurnRow, VerdictRow
from records.tables.sql import chunks

NEAR_WINDOW = 256
"""A hint is compared with this many of the newest; older ones are too many to look at."""
STATE_WINDOW = 256
"""This many of the newest states of a scope are looked at."""
_LEAST_WINDOW = 32
"""The minimum per scope when states of many scopes are looked at together."""
_KEPT_SCOPES = 32
"""Number of scopes from which states are kept."""

UNFIT = (
    DropReason.SENSITIVE,
    DropReason.RECORD_ONLY,
    DropReason.FORGOTTEN,
    DropReason.AMBIGUOUS_PARENT,
    DropReason.INTERNAL_ERROR,
    DropReason.HELD_OUT,
)
"""A turn dropped for one of these reasons is not a state to learn at: nobody consented, it is to be
forgotten, its conversation is unclear, a stage failed on it and another one may, or it only
measures. Other reasons concern the turn's answer, but of a state only the prompt is read.
"""


def hints(
    connection: Connection,
    scope: str | None,
    statuses: Sequence[HintStatus] | None,
    limit: int,
    after: str | None,
) -> list[Hint]:
    """Hints, newest first, starting after the hint `after`."""
    conditions: list[ColumnElement[bool]] = []
    if scope is not None:
        conditions.append(HintRow.scope == scope)
    if statuses is not None:
        conditions.append(HintRow.status.in_(statuses))
    if after is not None:
        place = select(HintRow.created_at, HintRow.hint_id).where(HintRow.hint_id == after)
        known = connection.execute(place).one_or_none()
        if known is None:
            return []
        conditions.append(tuple_(HintRow.created_at, HintRow.hint_id) < tuple_(*known))
    rows = connection.execute(
        select(HintRow.__table__)
        .where(*conditions)
        .order_by(HintRow.created_at.desc(), HintRow.hint_id.desc())
        .limit(limit)
    ).all()
    return _with_counts(connection, rows)


def by_ids(connection: Connection, hint_ids: Sequence[str]) -> list[Hint]:
    """Those of these hints that exist, in the same order."""
    rows: dict[str, Row[Any]] = {}
    for part in chunks(hint_ids):
        statement = select(HintRow.__table__).where(HintRow.hint_id.in_(part))
        rows.update((row.hint_id, row) for row in connection.execute(statement))
    return _with_counts(connection, [rows[one] for one in hint_ids if one in rows])


def to_rehearse(connection: Connection, limit: int) -> list[Hint]:
    """Rules that hold, newest first. Resting and stuck ones are still measured, and their open
    wishes preserved.
    """
    rows = connection.execute(
        select(HintRow.__table__)
        .where(HintRow.status.in_(LIVE_STATUSES), HintRow.is_rule.is_(True))
        .order_by(HintRow.created_at.desc(), HintRow.hint_id)
        .limit(limit)
    ).all()
    return _with_counts(connection, rows)


def is_practising(connection: Connection) -> bool:
    """Whether a rule has been prepared and measured, and still holds."""
    found = select(HintRow.hint_id).where(
        HintRow.status.in_(LIVE_STATUSES),
        HintRow.is_rule.is_(True),
        HintRow.block.is_(None),
        HintRow.first_gap.is_not(None),
    )
    return connection.scalar(found.limit(1)) is not None


def counts(connection: Connection) -> dict[tuple[HintStatus, RehearsalBlock | None], int]:
    """Number of hints by status and by why they are not rehearsed."""
    number = func.count().label("number")
    statement = select(HintRow.status, HintRow.block, number).group_by(
        HintRow.status, HintRow.block
    )
    return {(row.status, row.block): row.number for row in connection.execute(statement)}


def rules(connection: Connection) -> dict[bool | None, int]:
    """Number of hints by the judge's answer to whether each is a rule; None: not asked yet."""
    number = func.count().label("number")
    statement = select(HintRow.is_rule, number).group_by(HintRow.is_rule)
    return {row.is_rule: row.number for row in connection.execute(statement)}


def of_ready_turns(connection: Connection) -> set[str]:
    """Hints given by turns that wait to be trained on."""
    return set(
        connection.scalars(
            select(HintSourceRow.hint_id)
            .join(TurnRow, TurnRow.turn_id == HintSourceRow.turn_id)
            .where(TurnRow.state == TurnState.READY)
            .distinct()
        )
    )


def _with_counts(connection: Connection, rows: Sequence[Row[Any]]) -> list[Hint]:
    counts: dict[str, int] = {}
    for part in chunks([row.hint_id for row in rows]):
        number = func.count().label("number")
        found = connection.execute(
            select(HintSourceRow.hint_id, number)
            .where(HintSourceRow.hint_id.in_(part))
            .group_by(HintSourceRow.hint_id)
        )
        counts.update((row.hint_id, row.number) for row in found)
    return [_hint(row, counts.get(row.hint_id, 0)) for row in rows]


def _hint(row: Row[Any], num_confirmed: int) -> Hint:
    return Hint(
        hint_id=row.hint_id,
        scope=row.scope,
        text=row.text,
        status=row.status,
        detail=row.detail,
        created_at=row.created_at,
        updated_at=row.updated_at,
        num_confirmed=num_confirmed,
        is_rule=row.is_rule,
        block=row.block,
        opposed_by=row.opposed_by,
        merged_into=row.merged_into,
        trained_since=row.trained_since,
        num_steps=row.num_steps,
        first_gap=row.first_gap,
        gap=row.gap,
        gap_high=row.gap_high,
    )


def sources(connection: Connection, hint_id: str, limit: int) -> list[HintSource]:
    """Where a hint came from, newest first."""
    rows = connection.execute(
        select(HintSourceRow.__table__)
        .where(HintSourceRow.hint_id == hint_id)
        .order_by(HintSourceRow.created_at.desc(), HintSourceRow.turn_id)
        .limit(limit)
    )
    return [HintSource(**row._mapping) for row in rows]


def of_each_session(connection: Connection, hint_id: str, limit: int) -> list[HintSource]:
    """A source of each session that gave a hint, newest first: its newest one with words, if any of
    them has words.
    """
    place = func.row_number().over(
        partition_by=HintSourceRow.session_id,
        order_by=(
            HintSourceRow.words == "",
            HintSourceRow.created_at.desc(),
            HintSourceRow.turn_id,
        ),
    )
    found = (
        select(HintSourceRow.__table__, place.label("place"))
        .where(HintSourceRow.hint_id == hint_id)
        .subquery()
    )
    columns = [found.c[column.name] for column in HintSourceRow.__table__.columns]
    rows = connection.execute(
        select(*columns)
        .where(found.c.place == 1)
        .order_by(found.c.created_at.desc(), found.c.turn_id)
        .limit(limit)
    )
    return [HintSource(**row._mapping) for row in rows]


def newest_words(connection: Connection, hint_ids: Sequence[str]) -> dict[str, str]:
    """The newest words that each hint came from, if there are any."""
    place = func.row_number().over(
        partition_by=HintSourceRow.hint_id,
        order_by=(HintSourceRow.created_at.desc(), HintSourceRow.turn_id),
    )
    found = (
        select(HintSourceRow.hint_id, HintSourceRow.words, place.label("place"))
        .where(HintSourceRow.hint_id.in_(hint_ids))
        .subquery()
    )
    rows = connection.execute(select(found.c.hint_id, found.c.words).where(found.c.place == 1))
    return {row.hint_id: row.words for row in rows}


def prompts(connection: Connection, hint_id: str) -> list[HintPrompt]:
    """The words that were written for a hint."""
    rows = connection.execute(
        select(HintPromptRow.__table__)
        .where(HintPromptRow.hint_id == hint_id)
        .order_by(HintPromptRow.prompt_id)
    )
    return [HintPrompt(**row._mapping) for row in rows]


def states(connection: Connection, hint_id: str) -> list[HintState]:
    """The states of a hint."""
    rows = connection.execute(
        select(HintStateRow.__table__)
        .where(HintStateRow.hint_id == hint_id)
        .order_by(HintStateRow.turn_id)
    )
    return [HintState(**row._mapping) for row in rows]


def taught_at(connection: Connection, hint_id: str) -> list[str]:
    """Turns at which a hint taught: its states and sources, if they may serve as states; at most
    STATE_WINDOW.
    """
    turn_ids = [
        turn_id
        for model in (HintStateRow, HintSourceRow)
        for turn_id in connection.scalars(
            select(model.turn_id).where(model.hint_id == hint_id).order_by(model.turn_id)
        )
    ]
    return _still_eligible(connection, list(dict.fromkeys(turn_ids)))[:STATE_WINDOW]


def near(
    connection: Connection, hint_id: str, scope: str, text: str, limit: int, other_scopes: bool
) -> list[Hint]:
    """Examined hints that hold, most similar words first: of this scope, or the rules of all others
    (a hint about one answer only must not pause another scope's rule).
    """
    of_scope = (
        and_(HintRow.scope != scope, HintRow.is_rule.is_(True))
        if other_scopes
        else HintRow.scope == scope
    )
    rows = connection.execute(
        select(HintRow.__table__)
        .where(
            HintRow.status.in_(LIVE_STATUSES),
            HintRow.is_rule.is_not(None),
            of_scope,
            HintRow.hint_id != hint_id,
        )
        .order_by(HintRow.created_at.desc(), HintRow.hint_id)
        .limit(NEAR_WINDOW)
    ).all()
    alike = likeness(text, [row.text for row in rows])
    # Among equals the newest first: sorting is stable.
    ranked = sorted(range(len(rows)), key=lambda index: -alike[index])
    return _with_counts(connection, [rows[index] for index in ranked[:limit]])


def states_near(connection: Connection, hint_id: str, rule: str, limit: int) -> list[str]:
    """Turns of the hint's scope at which it may be rehearsed, the likeliest first.

    With the `rule` "tools": those whose answer called the same tools as a source of the hint,
    newest first. With "near": all, those whose last user message is most like that of a source
    first.
    """
    scope = connection.scalar(select(HintRow.scope).where(HintRow.hint_id == hint_id))
    if scope is None:
        return []
    origins = list(
        connection.scalars(
            select(HintSourceRow.turn_id)
            .where(HintSourceRow.hint_id == hint_id)
            .order_by(HintSourceRow.created_at.desc())
            .limit(16)
        )
    )
    found = _eligible(connection, TurnRow.scope == scope)
    turn_ids = list(dict.fromkeys([*_still_eligible(connection, origins), *found]))
    if rule == "tools":
        called = _called(connection, [*turn_ids, *origins])
        like = {called[one] for one in origins if one in called}
        return [one for one in turn_ids if called.get(one) in like][:limit]
    if rule != "near":
        raise ValueError(f"states are chosen by 'tools' or 'near', not by {rule!r}")
    asked = _last_user_words(connection, [*turn_ids, *origins])
    like_words = [asked[one] for one in origins if one in asked]
    ranked = sorted(
        turn_ids,
        key=lambda one: (
            -max((overlap(asked.get(one, frozenset()), words) for words in like_words), default=0.0)
        ),
    )
    return ranked[:limit]


def keep_states(connection: Connection, exclude_hints: Sequence[str], limit: int) -> list[str]:
    """Turns at which none of these hints is rehearsed: the newest of each scope in turn, because
    otherwise one busy scope could fill the list. If there are very many scopes, some at random.
    """
    taken: set[str] = set()
    for part in chunks(exclude_hints):
        for model in (HintStateRow, HintSourceRow):
            taken.update(connection.scalars(select(model.turn_id).where(model.hint_id.in_(part))))
    scopes = _some_scopes(connection, _KEPT_SCOPES)
    window = max(STATE_WINDOW // max(len(scopes), 1), _LEAST_WINDOW)
    newest = [_eligible(connection, TurnRow.scope == scope, window) for scope in scopes]
    free = [[one for one in of_scope if one not in taken] for of_scope in newest]
    dealt = [one for row in zip_longest(*free) for one in row if one is not None]
    return dealt[:limit]


def _some_scopes(connection: Connection, most: int) -> list[str]:
    """Up to `most` scopes that have turns: those that follow the scope of a random turn, with one
    index lookup for each.
    """
    drawn = select(TurnRow.scope).order_by(TurnRow.turn_id).limit(1)
    begin = connection.scalar(drawn.where(TurnRow.turn_id >= uuid4().hex))
    first = connection.scalar(select(func.min(TurnRow.scope))) if begin is None else begin
    found: list[str] = []
    scope = first
    while scope is not None and len(found) < most:
        found.append(scope)
        following = connection.scalar(select(func.min(TurnRow.scope)).where(TurnRow.scope > scope))
        if following is None:  # after the last one comes the first
            following = connection.scalar(select(func.min(TurnRow.scope)))
        scope = None if following == first else following
    return sorted(found)


def accepted(connection: Connection, turn_ids: Sequence[str]) -> set[str]:
    """Those of these turns whose answer the judge saw accepted: judged, and no hint."""
    found: set[str] = set()
    for part in chunks(turn_ids):
        found.update(
            connection.scalars(
                select(VerdictRow.turn_id)
                .join(TurnRow, TurnRow.turn_id == VerdictRow.turn_id)
                .where(
                    VerdictRow.turn_id.in_(part),
                    VerdictRow.hint.is_(None),
                    TurnRow.drop_reason == DropReason.NO_HINT,
                )
            )
        )
    return found


def _fit(of_scope: ColumnElement[bool] | None = None) -> list[ColumnElement[bool]]:
    """Conditions for main turns with ids, in any state, however their answers were sampled."""
    conditions = [
        TurnRow.turn_type == TurnType.MAIN,
        or_(TurnRow.drop_reason.is_(None), TurnRow.drop_reason.not_in(UNFIT)),
        # A redacted turn has no ids.
        TokensRow.prompt_length > 0,
        # A held-out turn that is not scored yet has no drop reason.
        ~IS_HELD_OUT,
    ]
    return conditions if of_scope is None else [*conditions, of_scope]


def _eligible(
    connection: Connection, of_scope: ColumnElement[bool], window: int = STATE_WINDOW
) -> list[str]:
    """The newest turns of a scope at which lessons may be drawn, newest first."""
    rows: list[Any] = []
    # Each is a range of the index of waiting turns.
    for state in TurnState:
        for priority in (*PRIORITIES, HINT_ONLY_PRIORITY):
            rows += connection.execute(
                select(TurnRow.turn_id, TurnRow.created_at)
                .join(TokensRow, TokensRow.turn_id == TurnRow.turn_id)
                .where(TurnRow.state == state, TurnRow.priority == priority, *_fit(of_scope))
                .order_by(TurnRow.created_at.desc(), TurnRow.turn_id)
                .limit(window)
            ).all()
    newest = sorted(rows, key=lambda row: (-row.created_at, row.turn_id))
    return [row.turn_id for row in newest[:window]]


def _still_eligible(connection: Connection, turn_ids: Sequence[str]) -> list[str]:
    found: set[str] = set()
    for part in chunks(turn_ids):
        statement = (
            select(TurnRow.turn_id)
            .join(TokensRow, TokensRow.turn_id == TurnRow.turn_id)
            .where(TurnRow.turn_id.in_(part), *_fit())
        )
        found.update(connection.scalars(statement))
    return [one for one in turn_ids if one in found]


def _called(connection: Connection, turn_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The names of the tools that each turn's answer called."""
    found: dict[str, tuple[str, ...]] = {}
    for part in chunks(list(dict.fromkeys(turn_ids))):
        statement = (
            select(TurnRow.turn_id, NodeRow.body)
            .join(NodeRow, NodeRow.node_id == TurnRow.response_node_id)
            .where(TurnRow.turn_id.in_(part))
        )
        for row in connection.execute(statement):
            calls = row.body.get("tool_calls") or ()
            found[row.turn_id] = tuple(sorted({str(call["function"]["name"]) for call in calls}))
    return found


def _last_user_words(connection: Connection, turn_ids: Iterable[str]) -> dict[str, frozenset[str]]:
    """The words of the last user message that each turn answered."""
    turns: dict[str, str] = {}
    wanted: set[str] = set()
    for part in chunks(list(dict.fromkeys(turn_ids))):
        statement = select(TurnRow.turn_id, TurnRow.prompt_node_id).where(TurnRow.turn_id.in_(part))
        for row in connection.execute(statement):
            turns[row.turn_id] = row.prompt_node_id
            wanted.add(row.prompt_node_id)
    nodes: dict[str, tuple[str | None, Any]] = {}
    # Go up all conversations together: one query per message after the last user message.
    while wanted:
        above: set[str] = set()
        for part in chunks(sorted(wanted)):
            statement = select(NodeRow.node_id, NodeRow.parent_id, NodeRow.body)
            for row in connection.execute(statement.where(NodeRow.node_id.in_(part))):
                nodes[row.node_id] = row.parent_id, row.body
                if row.body["role"] != "user" and row.parent_id is not None:
                    above.add(row.parent_id)
        wanted = above - nodes.keys()
    found: dict[str, frozenset[str]] = {}
    for turn_id, leaf in turns.items():
        node: str | None = leaf
        while node is not None and node in nodes:
            parent, body = nodes[node]
            if body["role"] == "user":
                found[turn_id] = words_of(content_text(body.get("content")))
                break
            node = parent
    return found
