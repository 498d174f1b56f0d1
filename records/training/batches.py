"""Which ready turns and lessons make the next batch. It locks what it chooses.

Turns alone: live ones first, then those of recordings, then those that have trained before, if they
may train again; round robin by scope, at most its `Share` of each, its oldest first. With lessons,
a batch has parts, each filled by the same rules, and is leased whole or not at all:

    hinted    ready turns, then lessons of hints
    counter   counter-lessons
    keep      keep-lessons
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from sqlalchemy import ColumnElement, Connection, and_, exists, or_, select
from sqlalchemy.orm import aliased

from records.hints.pausing import IS_PAUSED, IS_UNGUARDED
from records.hints.rows import HintRow, HintSourceRow
from records.hints.types import HintStatus
from records.lessons.claiming import UNFINISHED
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.rows import LessonRow
from records.names import TurnState
from records.outcomes.rows import came_later, has_outcome, was_given_up
from records.queue.round_robin import (
    PRIORITIES,
    Condition,
    ceil_div,
    deal,
    ring_of_scopes,
    waiting_scopes,
)
from records.tables.models import TurnRow, VerdictRow
from records.training.outcome_rewards import OutcomeRewards
from records.training.repeats import has_score, trains_again
from records.training.share import LessonShares, Share


class Candidate(NamedTuple):
    """A turn or a lesson that could train; `since` is when it became ready (unix seconds)."""

    item_id: str
    scope: str
    since: float
    is_lesson: bool


class Source(Protocol):
    """One kind of turns or lessons that fill a batch."""

    def scopes(self, connection: Connection, after: str, limit: int) -> list[str]:
        """Up to `limit` scopes that have some, starting after the scope `after`, in a ring."""
        ...

    def oldest(self, connection: Connection, scope: str, depth: int) -> list[Candidate]:
        """The oldest of a scope."""
        ...


@dataclass(frozen=True, slots=True)
class Turns:
    """Ready turns of one priority; those that are not free stay out."""

    priority: int
    is_free: Condition | None = None

    def scopes(self, connection: Connection, after: str, limit: int) -> list[str]:
        """As `Source`."""
        return waiting_scopes(
            connection, TurnState.READY, self.priority, self.is_free, after, limit
        )

    def oldest(self, connection: Connection, scope: str, depth: int) -> list[Candidate]:
        """As `Source`."""
        statement = (
            select(TurnRow.turn_id, TurnRow.scope, TurnRow.updated_at)
            .where(
                TurnRow.state == TurnState.READY,
                TurnRow.priority == self.priority,
                TurnRow.scope == scope,
            )
            .order_by(TurnRow.created_at, TurnRow.turn_id)
        )
        if self.is_free is not None:
            statement = statement.where(self.is_free(TurnRow))
        return _locked(connection, statement, depth, is_lesson=False)


@dataclass(frozen=True, slots=True)
class Lessons:
    """Ready lessons of one kind."""

    kind: LessonKind

    def scopes(self, connection: Connection, after: str, limit: int) -> list[str]:
        """As `Source`."""
        return ring_of_scopes(
            connection,
            LessonRow,
            lambda row: [row.state == LessonState.READY, row.kind == self.kind],
            after,
            limit,
        )

    def oldest(self, connection: Connection, scope: str, depth: int) -> list[Candidate]:
        """As `Source`."""
        statement = (
            select(LessonRow.lesson_id, LessonRow.scope, LessonRow.updated_at)
            .where(
                LessonRow.state == LessonState.READY,
                LessonRow.kind == self.kind,
                LessonRow.scope == scope,
            )
            .order_by(LessonRow.created_at, LessonRow.lesson_id)
        )
        return _locked(connection, statement, depth, is_lesson=True)


class Repeats:
    """Turns that have trained and may train again, the least often trained first."""

    def scopes(self, connection: Connection, after: str, limit: int) -> list[str]:
        """As `Source`."""
        return ring_of_scopes(connection, TurnRow, _may_repeat, after, limit)

    def oldest(self, connection: Connection, scope: str, depth: int) -> list[Candidate]:
        """As `Source`."""
        statement = (
            select(TurnRow.turn_id, TurnRow.scope, TurnRow.updated_at)
            .where(TurnRow.scope == scope, *_may_repeat(TurnRow))
            .order_by(TurnRow.times_trained, TurnRow.created_at, TurnRow.turn_id)
        )
        return _locked(connection, statement, depth, is_lesson=False)


def _may_repeat(row: type[TurnRow]) -> list[ColumnElement[bool]]:
    return [*trains_again(row), ~_stays_out(row)]


def _locked(
    connection: Connection, statement: Any, depth: int, *, is_lesson: bool
) -> list[Candidate]:
    locked = statement.limit(depth).with_for_update(skip_locked=True)
    rows: Sequence[Any] = connection.execute(locked).all()
    return [Candidate(row[0], row[1], row[2], is_lesson) for row in rows]


def ready_turns(is_free: Condition | None = None) -> list[Turns]:
    """Ready turns: those of live agents before those of recordings."""
    return [Turns(priority, is_free) for priority in PRIORITIES]


def practised_or_ready_before(since: float) -> Condition:
    """Turns that have no lessons to wait for, and those that became ready before `since`; never one
    whose hint another scope opposes, since somebody has to decide first, nor one whose hint several
    sessions gave without its being practised.
    """
    return lambda row: and_(~_stays_out(row), or_(row.updated_at < since, ~awaits_practice(row)))


def waited_enough(outcomes: OutcomeRewards | None, now: float) -> Condition | None:
    """Turns of sessions whose outcome is known and, if hints train alone, those with a hint that
    will get no outcome; None: all.
    """
    if outcomes is None:
        return None
    if not outcomes.hints_train:
        return has_outcome
    since = now - outcomes.wait_s
    return lambda row: or_(has_outcome(row), and_(has_score(row), none_comes(row, since)))


def none_comes(row: type[TurnRow], since: float) -> ColumnElement[bool]:
    """Whether the turn has waited for its session's outcome since then, or waits in vain."""
    verdict = aliased(VerdictRow)
    judged = exists().where(verdict.turn_id == row.turn_id, verdict.created_at < since)
    return or_(judged, was_given_up(row), came_later(row))


def both(first: Condition | None, second: Condition | None) -> Condition | None:
    """What meets both conditions; None is met by all."""
    if first is None or second is None:
        return first or second
    return lambda row: and_(first(row), second(row))


def _stays_out(row: type[TurnRow]) -> ColumnElement[bool]:
    """Whether another scope opposes a hint of the turn, or nothing would guard what it teaches; the
    rehearsal worker drops such a one a moment later (`drop_unguarded_op`).
    """
    held = exists().where(
        HintSourceRow.turn_id == row.turn_id,
        HintRow.hint_id == HintSourceRow.hint_id,
        or_(IS_PAUSED, IS_UNGUARDED),
    )
    return and_(held, _keeps_hint(row))


def _keeps_hint(row: type[TurnRow]) -> ColumnElement[bool]:
    """Whether the turn has a hint: one may go on with its reward alone."""
    verdict = aliased(VerdictRow)  # the caller may have joined the table
    return exists().where(verdict.turn_id == row.turn_id, verdict.hint.is_not(None))


def awaits_practice(row: type[TurnRow]) -> ColumnElement[bool]:
    """Whether the turn's hint still has to be examined, or to get its first lesson; or is resting
    or stuck, and its counter-lessons still have to be made again.
    """
    lessons = exists().where(LessonRow.hint_id == HintRow.hint_id)
    # Not by hint: one that was practised for long has thousands of lessons, of which few are under
    # way.
    under_way = select(LessonRow.hint_id).where(
        LessonRow.state.in_(UNFINISHED),
        LessonRow.kind == LessonKind.COUNTER,
        LessonRow.hint_id.is_not(None),
    )
    is_new = and_(HintRow.status == HintStatus.ACTIVE, HintRow.block.is_(None), ~lessons)
    is_bare = and_(
        HintRow.status.in_((HintStatus.RESTING, HintStatus.STUCK)),
        lessons.where(LessonRow.kind == LessonKind.COUNTER),
        HintRow.hint_id.not_in(under_way),
    )
    awaited = exists().where(
        HintSourceRow.turn_id == row.turn_id,
        HintRow.hint_id == HintSourceRow.hint_id,
        or_(is_new, is_bare),
    )
    return and_(awaited, _keeps_hint(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one lease takes. The next batch starts after the scope `last_scope`."""

    turn_ids: list[str]
    lesson_ids: list[str]
    last_scope: str


def turns_alone(
    connection: Connection,
    count: int,
    now: float,
    share: Share,
    after: str,
    is_free: Condition | None = None,
    repeats: bool = False,
) -> Batch | None:
    """A batch of turns; None if there are not enough, or none may be added yet. With `repeats`,
    turns that have trained before fill it up.
    """
    chosen: list[Candidate] = []
    sources: list[Source] = [*ready_turns(is_free), *([Repeats()] if repeats else [])]
    for source in sources:
        left = count - len(chosen)
        if not left:
            break
        scopes = source.scopes(connection, after, left)
        if not scopes:
            continue
        oldest = partial(source.oldest, connection)
        queues = [oldest(scope, ceil_div(left, len(scopes))) for scope in scopes]
        most = share.of(count, len(scopes))
        if sum(map(len, queues)) < left:  # some have less than their part: the others fill up
            queues = [oldest(scope, left) for scope in scopes]
        dealt = deal(queues, left, most)
        if len(dealt) < left and _is_old(queues, most, now - share.wait_s):
            dealt = deal(queues, left)
        chosen += dealt
    if len(chosen) < count:
        return None
    return _batch(chosen, chosen[-1].scope)


def _is_old(queues: Sequence[Sequence[Candidate]], most: int, since: float) -> bool:
    """Whether one of a scope that is within its share has been ready since then."""
    return any(one.since <= since for queue in queues if 0 < len(queue) <= most for one in queue)


def with_lessons(
    connection: Connection,
    count: int,
    now: float,
    share: Share,
    shares: LessonShares,
    after: str,
    may_train: Condition | None = None,
) -> Batch | None:
    """A batch of turns that `may_train` and lessons; of turns alone if no lessons of hints are
    expected, or if expected ones do not come (see `LessonShares`). None if a part cannot be filled.
    """
    recent = {kind for kind in LessonKind if _is_recent(connection, kind, now - shares.wait_s)}
    expected = recent | {kind for kind in LessonKind if _is_under_way(connection, kind)}
    counter, keep = shares.of(
        count,
        has_counter=LessonKind.COUNTER in expected,
        has_keep=LessonKind.KEEP in expected,
    )
    fill = partial(_part, connection, now=now, share=share, after=after)
    is_rehearsing = bool(expected & {LessonKind.HINT, LessonKind.COUNTER})
    practised = practised_or_ready_before(now - shares.hold_s) if shares.hold_s else None
    is_free = both(practised, may_train)
    hinted: list[Source] = [*ready_turns(is_free)]
    hinted += [Lessons(LessonKind.HINT)] if LessonKind.HINT in expected else []
    lessons = [
        *(fill([Lessons(LessonKind.COUNTER)], counter) or []),
        *(fill([Lessons(LessonKind.KEEP)], keep) or []),
    ]
    if len(lessons) == counter + keep:
        chosen = fill(hinted, count - counter - keep)
        if chosen is not None:
            return _batch([*chosen, *lessons], (chosen or lessons)[-1].scope)
    returning = _to_return(connection, fill, count, is_free)
    if returning is not None:
        return _batch(returning, returning[-1].scope)
    if not is_rehearsing or shares.alone or not recent:
        return turns_alone(connection, count, now, share, after, is_free)
    return None


def _to_return(
    connection: Connection,
    fill: Callable[[Sequence[Source], int], list[Candidate] | None],
    count: int,
    is_free: Condition | None,
) -> list[Candidate] | None:
    """A batch of ready turns, then keep-lessons: nothing is practised, and what ended hints taught
    has to be unlearned. So many keep-lessons are made for nothing else.
    """
    if any(_is_under_way(connection, kind) for kind in (LessonKind.HINT, LessonKind.COUNTER)):
        return None
    kept = Lessons(LessonKind.KEEP)
    if fill([kept], count) is None:
        return None
    return fill([*ready_turns(is_free), kept], count)


def _batch(chosen: Sequence[Candidate], last_scope: str) -> Batch:
    return Batch(
        turn_ids=[one.item_id for one in chosen if not one.is_lesson],
        lesson_ids=[one.item_id for one in chosen if one.is_lesson],
        last_scope=last_scope,
    )


def _is_under_way(connection: Connection, kind: LessonKind) -> bool:
    waits = select(LessonRow.lesson_id).where(
        LessonRow.state.in_(UNFINISHED), LessonRow.kind == kind
    )
    return connection.scalar(waits.limit(1)) is not None


def _is_recent(connection: Connection, kind: LessonKind, since: float) -> bool:
    """Whether lessons of this kind were made, trained or became stale since then: just after a step
    there may be none, while the next ones are being planned.
    """
    changed = select(LessonRow.lesson_id).where(
        LessonRow.kind == kind,
        LessonRow.updated_at >= since,
        or_(LessonRow.state != LessonState.DROPPED, LessonRow.drop_reason == LessonDrop.STALE),
    )
    return connection.scalar(changed.limit(1)) is not None


def _part(
    connection: Connection,
    sources: Sequence[Source],
    count: int,
    *,
    now: float,
    share: Share,
    after: str,
) -> list[Candidate] | None:
    """`count` candidates, those of earlier sources first; None if there are not enough, or one
    scope would have more than its share of this part.
    """
    if not count:
        return []
    scopes = [source.scopes(connection, after, count) for source in sources]
    everybody = {scope for of_source in scopes for scope in of_source}
    if not everybody:
        return None
    most = share.of(count, len(everybody))
    queues: list[list[list[Candidate]]] = []
    for depth in (ceil_div(count, len(everybody)), count):
        queues = [
            [source.oldest(connection, scope, depth) for scope in of_source]
            for source, of_source in zip(sources, scopes, strict=True)
        ]
        chosen = _deal_in_order(queues, count, most)
        if len(chosen) == count:
            return chosen
    by_scope: dict[str, list[Candidate]] = {}
    for queue in (queue for of_source in queues for queue in of_source):
        for one in queue:
            by_scope.setdefault(one.scope, []).append(one)
    if not _is_old(list(by_scope.values()), most, now - share.wait_s):
        return None
    chosen = _deal_in_order(queues, count, count)
    return chosen if len(chosen) == count else None


def _deal_in_order(
    queues: Sequence[Sequence[Sequence[Candidate]]], count: int, most: int
) -> list[Candidate]:
    """Up to `count`, source by source, at most `most` of one scope in total."""
    chosen: list[Candidate] = []
    taken: Counter[str] = Counter()
    for of_source in queues:
        room = [queue[: most - taken[queue[0].scope]] for queue in of_source if queue]
        dealt = deal(room, count - len(chosen))
        taken.update(one.scope for one in dealt)
        chosen += dealt
    return chosen
