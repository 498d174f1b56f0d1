"""What people decide on the judge's hints before they train: approve, edit or reject.

A hint that waits for a person is not in the memory and teaches nothing. When it is approved, it
enters the memory and its turn goes on to the teacher, in one transaction. A turn that is too old to
train by then is dropped there like any other, and its hint stays.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from sqlalchemy import ColumnElement, Connection, func, select, true, tuple_, update
from sqlalchemy.orm import aliased

from records.errors import StoreConflict, StoreCorrupt
from records.feedback.feedback import load as load_feedback
from records.hints.memory import remember, words_of
from records.messages import Message
from records.names import DropReason, ReviewDecision, TurnState
from records.queue.hintless import go_on_without_hint
from records.reading.summary import verdicts_of
from records.tables.columns import clean_text
from records.tables.models import NodeRow, ReviewRow, TurnRow, VerdictRow
from records.tables.sql import upsert
from records.types import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A hint that waits for a person: `asked` is the message that was answered, `words` is what
    followed the answer. `num_positive` of `num_votes` votes, cast at `judged_at`, were for a hint.
    """

    turn_id: str
    session_id: str
    scope: str
    created_at: float
    asked: Message
    answer: Message
    words: str
    hint: str
    judged_at: float
    num_votes: int
    num_positive: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HintDecision:
    """A person's decision on a turn's hint, as judged at `judged_at`: approved unchanged or as
    `hint`, or not approved.
    """

    turn_id: str
    judged_at: float
    is_approved: bool
    hint: str | None
    author: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HintReview:
    """A decision, at `created_at` (unix seconds). `hint` is the hint now; None: rejected."""

    turn_id: str
    decision: ReviewDecision
    proposed: str
    hint: str | None
    author: str
    created_at: float


def proposals(
    connection: Connection, scope: str | None, limit: int, after: str | None
) -> list[Proposal]:
    """Waiting hints of a scope (None: of all), those of the newest turns first, starting after the
    turn `after`.
    """
    place = (TurnRow.created_at, TurnRow.turn_id)
    behind: ColumnElement[bool] = true()
    if after is not None:
        last = connection.execute(select(*place).where(TurnRow.turn_id == after)).one_or_none()
        if last is None:
            return []
        behind = tuple_(*place) < tuple_(*last)
    asked, answer = aliased(NodeRow), aliased(NodeRow)
    rows = connection.execute(
        select(
            TurnRow.turn_id,
            TurnRow.session_id,
            TurnRow.scope,
            TurnRow.created_at,
            TurnRow.next_state,
            VerdictRow.created_at.label("judged_at"),
            asked.body.label("asked"),
            answer.body.label("answer"),
        )
        .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .join(asked, asked.node_id == TurnRow.prompt_node_id)
        .join(answer, answer.node_id == TurnRow.response_node_id)
        .where(
            TurnRow.state == TurnState.REVIEWING,
            true() if scope is None else TurnRow.scope == scope,
            behind,
        )
        .order_by(*(column.desc() for column in place))
        .limit(limit)
    ).all()
    turn_ids = [row.turn_id for row in rows]
    verdicts = verdicts_of(connection, turn_ids)
    feedback = load_feedback(connection, turn_ids)
    return [
        Proposal(
            turn_id=row.turn_id,
            session_id=row.session_id,
            scope=row.scope,
            created_at=row.created_at,
            asked=row.asked,
            answer=row.answer,
            words=words_of([*(row.next_state or ()), *feedback.get(row.turn_id, ([], None))[0]]),
            hint=_hint_of(verdicts[row.turn_id]),
            judged_at=row.judged_at,
            num_votes=len(verdicts[row.turn_id].votes),
            num_positive=sum(vote.score == 1 for vote in verdicts[row.turn_id].votes),
        )
        for row in rows
    ]


def review_op(
    connection: Connection, decided: HintDecision, scope: str | None, now: float
) -> HintReview | None:
    """reviewing -> scoring, and the hint enters the memory; if it is not approved, -> dropped, or
    ready with the turn's reward alone.

    None if there is no such turn (of the scope, if one is given). Raises StoreConflict for a turn
    that does not wait for a review, or was judged again since.
    """
    turn = connection.execute(
        select(TurnRow.scope, TurnRow.state, VerdictRow.created_at.label("judged_at"))
        .outerjoin(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .where(
            TurnRow.turn_id == decided.turn_id, true() if scope is None else TurnRow.scope == scope
        )
        .with_for_update(of=TurnRow)
    ).one_or_none()
    if turn is None:
        return None
    if turn.state is not TurnState.REVIEWING:
        raise StoreConflict(f"The turn does not wait for a review: it is {turn.state.value}.")
    if turn.judged_at != decided.judged_at:
        raise StoreConflict("The turn was judged again; look at its new hint.")
    verdict = verdicts_of(connection, [decided.turn_id])[decided.turn_id]
    review = _review(decided, _hint_of(verdict), now)
    upsert(connection, ReviewRow, [{**asdict(review), "scope": turn.scope}])
    is_rejected = review.hint is None
    connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == decided.turn_id)
        .values(
            state=TurnState.DROPPED if is_rejected else TurnState.SCORING,
            drop_reason=DropReason.REVIEW_REJECTED if is_rejected else None,
            updated_at=now,
        )
    )
    if is_rejected:
        go_on_without_hint(connection, [decided.turn_id], now)
        return review
    # The hints of other votes were not shown, so none of them may take its place.
    connection.execute(
        update(VerdictRow)
        .where(VerdictRow.turn_id == decided.turn_id)
        .values(hint=review.hint, candidates=[review.hint])
    )
    remember(connection, [replace(verdict, hint=review.hint, candidates=())], now)
    return review


def _hint_of(verdict: Verdict) -> str:
    """The hint that waits for a person. Raises StoreCorrupt if there is none."""
    if not verdict.hint:
        raise StoreCorrupt(f"turn {verdict.turn_id} waits for a review without a hint")
    return verdict.hint


def _review(decided: HintDecision, proposed: str, now: float) -> HintReview:
    hint = proposed if decided.hint is None else clean_text(decided.hint)
    decision = ReviewDecision.APPROVED if hint == proposed else ReviewDecision.EDITED
    return HintReview(
        turn_id=decided.turn_id,
        decision=decision if decided.is_approved else ReviewDecision.REJECTED,
        proposed=proposed,
        hint=hint if decided.is_approved else None,
        author=decided.author,
        created_at=now,
    )


def review_of(connection: Connection, turn_id: str) -> HintReview | None:
    """What a person decided on a turn's hint; None if nobody did."""
    row = connection.execute(
        select(ReviewRow.__table__).where(ReviewRow.turn_id == turn_id)
    ).one_or_none()
    if row is None:
        return None
    values = row._asdict()
    del values["scope"]
    return HintReview(**values)


def decisions(connection: Connection, scope: str | None) -> dict[ReviewDecision, int]:
    """How often people made each decision, on the hints of a scope (None: of all)."""
    rows = connection.execute(
        select(ReviewRow.decision, func.count().label("number"))
        .where(true() if scope is None else ReviewRow.scope == scope)
        .group_by(ReviewRow.decision)
    )
    found = {row.decision: row.number for row in rows}
    return {decision: found.get(decision, 0) for decision in ReviewDecision}
