"""Changes to a hint that is in the memory: its examination, its measurements, and its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from records.errors import StoreConflict
from records.hints import pausing
from records.hints.ending import contradict, stop
from records.hints.memory import look_again, look_again_if_repeated, take_back
from records.hints.restating import restate
from records.hints.rows import HintPromptRow, HintRow, HintSourceRow, HintStateRow
from records.hints.types import (
    LIVE_STATUSES,
    Examination,
    HintPrompt,
    HintState,
    HintStatus,
    RehearsalBlock,
)
from records.lessons.dropping import drop_of_hint_op
from records.lessons.names import LessonDrop
from records.names import DropReason, TurnState
from records.tables.models import TurnRow
from records.tables.sql import chunks, upsert

_MOVES = {
    HintStatus.ACTIVE: (HintStatus.RESTING, HintStatus.STUCK, HintStatus.WITHDRAWN),
    HintStatus.RESTING: (HintStatus.ACTIVE, HintStatus.WITHDRAWN),
    HintStatus.STUCK: (HintStatus.ACTIVE, HintStatus.RESTING, HintStatus.WITHDRAWN),
}
"""What may follow each status, except through an examination or a deletion."""


def claim_hints_op(
    connection: Connection, owner: str, limit: int, now: float, ttl_s: float
) -> list[str]:
    """Claim up to `limit` unexamined hints, one per scope: the one with the most sources, and of
    these the oldest. Scopes with a hint under examination are left out: two hints may be equal, and
    each is compared with those that were examined before.
    """
    waits = [HintRow.status.in_(LIVE_STATUSES), HintRow.is_rule.is_(None)]
    busy = select(HintRow.scope).where(*waits, HintRow.claim_until >= now)
    confirmed = (
        select(func.count())
        .where(HintSourceRow.hint_id == HintRow.hint_id)
        .correlate(HintRow)
        .scalar_subquery()
    )
    rows = connection.execute(
        select(HintRow.hint_id, HintRow.scope)
        .where(*waits, HintRow.scope.not_in(busy))
        .order_by(confirmed.desc(), HintRow.created_at, HintRow.hint_id)
        .limit(16 * limit)
        .with_for_update(skip_locked=True)
    ).all()
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row.scope, row.hint_id)
    chosen = list(first.values())[:limit]
    _claim(connection, chosen, owner, now + ttl_s)
    return chosen


def extend_hint_claims_op(
    connection: Connection, owner: str, hint_ids: Sequence[str], until: float
) -> int:
    """Move the deadline of claims that `owner` still holds."""
    return _of_owner(connection, owner, hint_ids, claim_until=until)


def release_hints_op(connection: Connection, owner: str, hint_ids: Sequence[str]) -> int:
    """Give back claims that `owner` still holds."""
    return _of_owner(connection, owner, hint_ids, claim_owner=None, claim_until=None)


def refute_op(
    connection: Connection,
    owner: str,
    hint_id: str,
    turn_ids: Sequence[str],
    detail: str,
    restated: Mapping[str, Sequence[str]],
    now: float,
) -> bool:
    """Remove sources whose answers do what the hint asks; those that are ready do not train. The
    `restated` ones have other candidates left, see `restate`. False if no source is left, which
    ends the hint, or if the claim is lost; otherwise the claim is given back, and the hint is
    examined with the remaining sources.
    """
    holds = select(HintRow.hint_id).where(HintRow.hint_id == hint_id, HintRow.claim_owner == owner)
    if connection.scalar(holds.with_for_update()) is None:
        return False
    for part in chunks(turn_ids):
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part), TurnRow.state == TurnState.READY)
            .values(
                state=TurnState.DROPPED,
                drop_reason=DropReason.HINT_AGREES,
                drop_detail=detail,
                updated_at=now,
            )
        )
    take_back(connection, turn_ids, now)
    restate(connection, restated, now)
    return release_hints_op(connection, owner, [hint_id]) > 0


def _claim(connection: Connection, hint_ids: Sequence[str], owner: str, until: float) -> None:
    for part in chunks(hint_ids):
        connection.execute(
            update(HintRow)
            .where(HintRow.hint_id.in_(part))
            .values(claim_owner=owner, claim_until=until)
        )


def _of_owner(connection: Connection, owner: str, hint_ids: Sequence[str], **values: Any) -> int:
    return sum(
        connection.execute(
            update(HintRow)
            .where(HintRow.hint_id.in_(part), HintRow.claim_owner == owner)
            .values(**values)
        ).rowcount
        for part in chunks(hint_ids)
    )


def examination_op(
    connection: Connection, owner: str, examination: Examination, now: float
) -> list[str] | None:
    """Write what an examination found; returns the hints that no longer hold because of it. None,
    and nothing is written, if the claim is lost or the hint no longer holds.
    """
    hint_id = examination.hint_id
    row = connection.execute(
        select(HintRow.claim_owner, HintRow.status, HintRow.scope)
        .where(HintRow.hint_id == hint_id)
        .with_for_update()
    ).one_or_none()
    if row is None or row.claim_owner != owner or row.status not in LIVE_STATUSES:
        return None
    if examination.merged_into is not None:
        return _merge(connection, hint_id, row.scope, examination.merged_into, now)
    if examination.contradicted_by is not None:
        return _give_way(connection, hint_id, row.scope, examination.contradicted_by, now)
    ended = [
        contradict(connection, other, row.scope, hint_id, now) for other in examination.contradicts
    ]
    block, opposed_by = examination.block, None
    opponents = pausing.still_live(connection, examination.opposed_elsewhere)
    if opponents:
        block, opposed_by = RehearsalBlock.OTHER_SCOPE, opponents[0]
        for other in opponents:
            pausing.pause(connection, other, hint_id, now)
    upsert(connection, HintPromptRow, [_prompt_row(one) for one in examination.prompts])
    connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id)
        .values(
            is_rule=examination.is_rule,
            block=block,
            opposed_by=opposed_by,
            detail=examination.detail,
            sessions_asked=examination.num_sessions,
            claim_owner=None,
            claim_until=None,
            updated_at=now,
        )
    )
    look_again_if_repeated(connection, hint_id)
    return [one for one in ended if one is not None]


def _merge(
    connection: Connection, hint_id: str, scope: str, into: str, now: float
) -> list[str] | None:
    target = connection.execute(
        select(HintRow.status, HintRow.scope).where(HintRow.hint_id == into).with_for_update()
    ).one_or_none()
    if target is None or target.status not in LIVE_STATUSES or target.scope != scope:
        release = update(HintRow).where(HintRow.hint_id == hint_id)
        connection.execute(release.values(claim_owner=None, claim_until=None))
        return None  # it ended meanwhile: the hint is examined again
    has = select(HintSourceRow.turn_id).where(HintSourceRow.hint_id == into)
    own = HintSourceRow.hint_id == hint_id
    connection.execute(delete(HintSourceRow).where(own, HintSourceRow.turn_id.in_(has)))
    connection.execute(update(HintSourceRow).where(own).values(hint_id=into))
    _take_away(connection, hint_id)
    drop_of_hint_op(connection, hint_id, LessonDrop.HINT_ENDED, now)
    connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id)
        .values(
            status=HintStatus.MERGED,
            merged_into=into,
            text_key=None,
            claim_owner=None,
            claim_until=None,
            updated_at=now,
        )
    )
    connection.execute(update(HintRow).where(HintRow.hint_id == into).values(updated_at=now))
    pausing.hand_over(connection, hint_id, into, now)
    look_again(connection, [into])
    return [hint_id]


def _give_way(
    connection: Connection, hint_id: str, scope: str, to: str, now: float
) -> list[str] | None:
    """An examined hint yields to one that was asked for since, if that still holds."""
    status = connection.scalar(
        select(HintRow.status).where(HintRow.hint_id == to, HintRow.scope == scope)
    )
    free = update(HintRow).where(HintRow.hint_id == hint_id)
    connection.execute(free.values(claim_owner=None, claim_until=None))
    if status not in LIVE_STATUSES:
        return None  # it ended meanwhile: the hint is examined again
    ended = contradict(connection, hint_id, scope, to, now)
    return [] if ended is None else [ended]


def _take_away(connection: Connection, hint_id: str) -> None:
    for model in (HintPromptRow, HintStateRow):
        connection.execute(delete(model).where(model.hint_id == hint_id))


def _prompt_row(prompt: HintPrompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "hint_id": prompt.hint_id,
        "kind": prompt.kind,
        "text": prompt.text,
        "held_out": prompt.held_out,
        "asked": prompt.asked,
        "followed": prompt.followed,
        "dropped": prompt.dropped,
    }


def examine_again_op(connection: Connection, hint_id: str, now: float) -> bool:
    """Let a rule that holds wait for the examiner once more; False if it has ended, already waits,
    or is opposed by another scope.
    """
    changed = connection.execute(
        update(HintRow)
        .where(
            HintRow.hint_id == hint_id,
            HintRow.status.in_(LIVE_STATUSES),
            HintRow.is_rule.is_(True),
            ~pausing.IS_PAUSED,
        )
        .values(is_rule=None, block=None, detail=None, updated_at=now)
    )
    return changed.rowcount > 0


def set_prompt_op(
    connection: Connection, prompt_id: str, asked: int, followed: int, dropped: str | None
) -> None:
    """Store how the start model followed a prompt's words, and why they are not used."""
    connection.execute(
        update(HintPromptRow)
        .where(HintPromptRow.prompt_id == prompt_id)
        .values(asked=asked, followed=followed, dropped=dropped)
    )


def settle_prompts_op(connection: Connection, hint_id: str, measuring: Sequence[str]) -> None:
    """Set which texts of a hint measure, now that it is practised. The others train and must never
    measure again, whatever texts are added.
    """
    connection.execute(
        update(HintPromptRow)
        .where(
            HintPromptRow.hint_id == hint_id,
            HintPromptRow.dropped.is_(None),
            HintPromptRow.held_out != HintPromptRow.prompt_id.in_(measuring),
        )
        .values(held_out=HintPromptRow.prompt_id.in_(measuring))
    )


def set_states_op(connection: Connection, hint_id: str, states: Sequence[HintState]) -> None:
    """Replace the states of a hint. Deleted turns are left out; a hint that has ended meanwhile is
    not changed.
    """
    holds = select(HintRow.hint_id).where(
        HintRow.hint_id == hint_id, HintRow.status.in_(LIVE_STATUSES)
    )
    if connection.scalar(holds.with_for_update()) is None:
        return
    connection.execute(delete(HintStateRow).where(HintStateRow.hint_id == hint_id))
    left: set[str] = set()
    for part in chunks([one.turn_id for one in states]):
        left.update(connection.scalars(select(TurnRow.turn_id).where(TurnRow.turn_id.in_(part))))
    upsert(
        connection,
        HintStateRow,
        [
            {"hint_id": hint_id, "turn_id": one.turn_id, "held_out": one.held_out}
            for one in states
            if one.turn_id in left
        ],
    )


def set_block_op(
    connection: Connection,
    hint_id: str,
    block: RehearsalBlock | None,
    detail: str | None,
    now: float,
) -> None:
    """Set why a hint is not rehearsed; None: it is. A hint that another scope opposes, or that has
    ended, is not changed: the caller read it minutes ago.
    """
    changed = connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id, HintRow.status.in_(LIVE_STATUSES), ~pausing.IS_PAUSED)
        .values(block=block, detail=detail, updated_at=now)
    )
    if changed.rowcount and block is not None:
        drop_of_hint_op(connection, hint_id, LessonDrop.HINT_ENDED, now)


def set_gap_op(
    connection: Connection, hint_id: str, gap: float, gap_high: float, first: bool, now: float
) -> None:
    """Store a measurement on held-back states, in nats per token; `first`: before any lesson."""
    values = {"gap": gap, "gap_high": gap_high, "updated_at": now}
    connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id)
        .values(**values, **({"first_gap": gap} if first else {}))
    )


def set_status_op(
    connection: Connection, hint_id: str, status: HintStatus, detail: str | None, now: float
) -> bool:
    """Set another status; False if the hint no longer holds or already has it.

    Raises StoreConflict for a status that cannot follow the one that it has.
    """
    current = connection.scalar(
        select(HintRow.status).where(HintRow.hint_id == hint_id).with_for_update()
    )
    if current is None or current not in LIVE_STATUSES or current is status:
        return False
    if status not in _MOVES[current]:
        raise StoreConflict(f"hint {hint_id}: {current.value} -> {status.value} is not allowed")
    values: dict[str, Any] = {"status": status, "detail": detail, "updated_at": now}
    if status not in LIVE_STATUSES:
        values["text_key"] = None
    connection.execute(update(HintRow).where(HintRow.hint_id == hint_id).values(**values))
    if status not in LIVE_STATUSES:
        stop(connection, hint_id, LessonDrop.HINT_ENDED, now)
        pausing.lift(connection, [hint_id], now)
    elif status is not HintStatus.ACTIVE:
        drop_of_hint_op(connection, hint_id, LessonDrop.HINT_ENDED, now)
    return True
