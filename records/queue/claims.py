"""Claims of the judge and scoring workers, and the commits that end them.

A claim is an owner and a deadline on a turn. After the deadline anyone may claim the turn. A commit
counts only while its owner still holds the turn, so a worker that lost its claim writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update

from records.feedback.feedback import counts as feedback_counts
from records.hints.memory import remember, take_back
from records.hints.restating import restate
from records.names import DropReason, TurnState
from records.queue.hintless import OF_THE_HINT, go_on_without_hint
from records.queue.round_robin import HINT_ONLY_PRIORITY, late_no_more
from records.queue.side_samples import side_row
from records.queue.waiting import CLAIMABLE, set_claims
from records.tables.columns import clean_text
from records.tables.loading import hint_candidates, load_recordings
from records.tables.models import (
    RecordingRow,
    ScoreRow,
    SideSamplesRow,
    TokensRow,
    TurnRow,
    VerdictRow,
    VoteRow,
)
from records.tables.sql import chunks, rows_in, table_of, upsert
from records.training.repeats import to_trained
from records.turns.recording import Recording, RecordingKind
from records.types import PolicyScore, SideSamples, Verdict

_INSERT_VOTES = table_of(VoteRow).insert()
_HELD = (
    select(TurnRow.turn_id, TurnRow.state, TurnRow.claim_owner)
    .where(TurnRow.turn_id.in_(bindparam("values", expanding=True)))
    .order_by(TurnRow.turn_id)
    .with_for_update()
)
_LATE = select(TurnRow.turn_id).where(
    TurnRow.turn_id.in_(bindparam("values", expanding=True)),
    TurnRow.priority == HINT_ONLY_PRIORITY,
)
_FOLLOWED = select(TurnRow.turn_id).where(
    TurnRow.turn_id.in_(bindparam("values", expanding=True)), TurnRow.next_state.is_not(None)
)
_CANDIDATES = select(VerdictRow.turn_id, VerdictRow.hint, VerdictRow.candidates).where(
    VerdictRow.turn_id.in_(bindparam("values", expanding=True))
)
_RECORDED = select(RecordingRow.turn_id).where(
    RecordingRow.turn_id.in_(bindparam("values", expanding=True)),
    RecordingRow.kind != RecordingKind.RESAMPLED,
)
_SET_LOGPROBS = (
    update(table_of(TokensRow))
    .where(TokensRow.turn_id == bindparam("key"))
    .values(rollout_logprobs=bindparam("logprobs"))
)
_SET_VERSION = (
    update(table_of(TurnRow))
    .where(TurnRow.turn_id == bindparam("key"))
    .values(
        version_spans=bindparam("spans"),
        oldest_version=bindparam("version"),
        newest_version=bindparam("version"),
    )
)
_MOVE = (
    update(table_of(TurnRow))
    .where(TurnRow.turn_id == bindparam("key"))
    .values(
        state=bindparam("to"),
        drop_reason=bindparam("reason"),
        priority=late_no_more(),
        claim_owner=None,
        claim_until=None,
        updated_at=bindparam("now"),
    )
)


def extend_op(connection: Connection, owner: str, turn_ids: Sequence[str], until: float) -> int:
    """Move the deadline of claims that `owner` still holds; returns how many."""
    return _update_held(connection, owner, turn_ids, claim_until=until)


def release_op(connection: Connection, owner: str, turn_ids: Sequence[str]) -> int:
    """Give back claims that `owner` still holds; returns how many."""
    return _update_held(connection, owner, turn_ids, claim_owner=None, claim_until=None)


def _update_held(connection: Connection, owner: str, turn_ids: Sequence[str], **values: Any) -> int:
    return sum(
        connection.execute(
            update(TurnRow)
            .where(
                TurnRow.turn_id.in_(part),
                TurnRow.claim_owner == owner,
                TurnRow.state.in_(CLAIMABLE),
            )
            .values(**values)
        ).rowcount
        for part in chunks(turn_ids)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTurn:
    """A verdict and what becomes of its turn: dropped for `drop`, or scoring with a hint, or ready
    with a reward alone. With `review` a person sees the hint first. `num_reactions` of its next
    state were judged; None: not given.
    """

    owner: str
    verdict: Verdict
    drop: DropReason | None
    now: float
    num_reactions: int | None = None
    review: bool = False

    @property
    def is_proposal(self) -> bool:
        """Whether its hint waits for a person."""
        return self.review and self.drop is None and bool(self.verdict.hint)


def verdict_op(connection: Connection, judged: Sequence[JudgedTurn]) -> list[bool]:
    """judging -> scoring, reviewing, ready or dropped; stores verdicts and votes. False for a lost
    claim.

    A turn that is judged for its hint alone can no longer train: it is dropped as hint_only, with
    its verdict. If feedback came meanwhile, the verdict is on too little: it is not kept, and the
    turn is free again.
    """
    owners = [(one.verdict.turn_id, one.owner) for one in judged]
    held = _still_held(connection, TurnState.JUDGING, owners)
    outdated = _outdated(
        connection, [one for one, is_held in zip(judged, held, strict=True) if is_held]
    )
    set_claims(connection, sorted(outdated), None, None)
    outcomes = [
        is_held and one.verdict.turn_id not in outdated
        for one, is_held in zip(judged, held, strict=True)
    ]
    kept = [one for one, is_held in zip(judged, outcomes, strict=True) if is_held]
    if not kept:
        return outcomes
    rewarded = [one.verdict.turn_id for one in kept if one.drop is None and not one.verdict.hint]
    # The policy has yet to say how probable a recorded response is.
    unscored = {row.turn_id for row in rows_in(connection, _RECORDED, rewarded)}
    late = {
        row.turn_id for row in rows_in(connection, _LATE, [one.verdict.turn_id for one in kept])
    }
    connection.execute(_MOVE, [_move_after_judging(one, unscored, late) for one in kept])
    upsert(connection, VerdictRow, [_verdict_row(one.verdict, one.now) for one in kept])
    turn_ids = [one.verdict.turn_id for one in kept]
    for part in chunks(turn_ids):
        connection.execute(delete(VoteRow).where(VoteRow.turn_id.in_(part)))
    if votes := [row for one in kept for row in vote_rows(one.verdict)]:
        connection.execute(_INSERT_VOTES, votes)
    remember(connection, [_accepted(one) for one in kept], kept[0].now)
    return outcomes


def _accepted(one: JudgedTurn) -> Verdict:
    """The verdict, without its hint if the turn was dropped or a person has yet to see it."""
    if one.verdict.hint is None or (one.drop is None and not one.is_proposal):
        return one.verdict
    return replace(one.verdict, hint=None, candidates=())


def _outdated(connection: Connection, judged: Sequence[JudgedTurn]) -> set[str]:
    """Turns whose next state is now longer than what was judged."""
    read = {
        one.verdict.turn_id: one.num_reactions for one in judged if one.num_reactions is not None
    }
    if not read:
        return set()
    counts = feedback_counts(connection, read)
    followed = {row.turn_id for row in rows_in(connection, _FOLLOWED, read)}
    return {
        turn_id
        for turn_id, number in read.items()
        if counts.get(turn_id, 0) + (turn_id in followed) > number
    }


def _still_held(
    connection: Connection, state: TurnState, wanted: Sequence[tuple[str, str]]
) -> list[bool]:
    """For each (turn id, owner): whether the owner holds the turn in `state`. Locks the rows.

    A turn that is asked for twice is held once.
    """
    turn_ids = sorted(turn_id for turn_id, _ in wanted)
    held = {
        (row.turn_id, row.claim_owner)
        for row in rows_in(connection, _HELD, turn_ids)
        if row.state is state
    }
    outcomes = []
    for key in wanted:
        outcomes.append(key in held)
        held.discard(key)
    return outcomes


def holds(connection: Connection, state: TurnState, owner: str, turn_id: str) -> bool:
    """Whether `owner` holds the turn in `state`. Locks its row."""
    return _still_held(connection, state, [(turn_id, owner)])[0]


def _move_after_judging(
    one: JudgedTurn, unscored: Collection[str], late: Collection[str]
) -> dict[str, Any]:
    turn_id, reason = one.verdict.turn_id, one.drop
    if one.is_proposal:
        return {"key": turn_id, "to": TurnState.REVIEWING, "reason": None, "now": one.now}
    if reason is None and turn_id in late:
        reason = DropReason.HINT_ONLY
    state = TurnState.SCORING if one.verdict.hint or turn_id in unscored else TurnState.READY
    if reason is not None:
        state = TurnState.DROPPED
    return {"key": turn_id, "to": state, "reason": reason, "now": one.now}


def _verdict_row(verdict: Verdict, now: float) -> dict[str, Any]:
    return {
        "turn_id": verdict.turn_id,
        "hint": verdict.hint,
        "selection": verdict.selection,
        "judge": verdict.judge,
        "num_omitted": verdict.num_omitted,
        "created_at": now,
        # Cleaned like the hint's own column, or the first would no longer be the hint.
        "candidates": [clean_text(hint) for hint in verdict.candidates] or None,
        "reward": verdict.reward,
        "awaits_outcome": verdict.awaits_outcome,
    }


def vote_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """The votes of a verdict as rows."""
    return [
        {
            "turn_id": verdict.turn_id,
            "vote_index": vote.index,
            "score": vote.score,
            "hint": vote.hint,
            "text": vote.text,
            "latency_s": vote.latency_s,
            "prompt_tokens": vote.prompt_tokens,
            "completion_tokens": vote.completion_tokens,
            "error": vote.error,
            "rejected": vote.rejected,
        }
        for vote in verdict.votes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurn:
    """The score rows of one turn. `candidates` are the hints that it had when scoring began (a
    control may score under others); None: not given. `policy` has the policy's log-probs of the
    response of a recording, `side_samples` were scored under the first of the hints.
    """

    owner: str
    turn_id: str
    rows: list[dict[str, Any]]
    now: float
    candidates: tuple[str, ...] | None = None
    policy: PolicyScore | None = None
    side_samples: SideSamples | None = None


def score_op(connection: Connection, scored: Sequence[ScoredTurn]) -> list[bool]:
    """scoring -> ready, or dropped(held_out); stores the score rows. False for a lost claim, and if
    the turn has other hints now because it was judged again.

    A score with the same key is replaced, and side samples by new ones. Raises ValueError for a
    recording without `policy`.
    """
    owners = [(one.turn_id, one.owner) for one in scored]
    held = _still_held(connection, TurnState.SCORING, owners)
    verdicts = rows_in(connection, _CANDIDATES, [one.turn_id for one in scored])
    hints = {row.turn_id: hint_candidates(row) for row in verdicts}
    outcomes = [
        is_held and one.candidates in (None, hints.get(one.turn_id))
        for one, is_held in zip(scored, held, strict=True)
    ]
    kept = [one for one, is_held in zip(scored, outcomes, strict=True) if is_held]
    if kept:
        restate(connection, _restated(kept, hints), kept[0].now)
        recordings = load_recordings(connection, [one.turn_id for one in kept])
        connection.execute(
            _MOVE, [_move_after_scoring(one, recordings.get(one.turn_id)) for one in kept]
        )
        upsert(connection, ScoreRow, [row for one in kept for row in one.rows])
        if drawn := [
            side_row(one.turn_id, one.side_samples, one.now)
            for one in kept
            if one.side_samples is not None
        ]:
            upsert(connection, SideSamplesRow, drawn)
        _keep_policy_scores(connection, kept, recordings)
    return outcomes


def _restated(
    scored: Sequence[ScoredTurn], hints: Mapping[str, tuple[str, ...]]
) -> dict[str, list[str]]:
    """By turn, the candidates that are left, if another one took the place of the first. Under a
    control, which scores with none of them, nothing changes.
    """
    left: dict[str, list[str]] = {}
    for one in scored:
        known = hints.get(one.turn_id, ())
        rows = sorted(one.rows, key=lambda row: row["candidate"])
        if rows and rows[0]["candidate"] == 0 and rows[0]["hint"] in known[1:]:
            left[one.turn_id] = [row["hint"] for row in rows]
    return left


def _move_after_scoring(one: ScoredTurn, recording: Recording | None) -> dict[str, Any]:
    is_held_out = recording is not None and recording.held_out
    return {
        "key": one.turn_id,
        "to": TurnState.DROPPED if is_held_out else TurnState.READY,
        "reason": DropReason.HELD_OUT if is_held_out else None,
        "now": one.now,
    }


def _keep_policy_scores(
    connection: Connection, scored: Sequence[ScoredTurn], recordings: dict[str, Recording]
) -> None:
    """The age of a recording counts from the version under which it was scored; these log-probs
    stand in for those of its sampler, unless it came with them.
    """
    logprobs, versions = [], []
    for one in scored:
        recording, policy = recordings.get(one.turn_id), one.policy
        if recording is None or recording.kind is RecordingKind.RESAMPLED:
            continue
        if policy is None:
            raise ValueError(f"turn {one.turn_id} is recorded: the policy has to score it")
        spans = [[policy.version, 0, len(policy.logprobs)]]
        versions.append({"key": one.turn_id, "spans": spans, "version": policy.version})
        if recording.kind is RecordingKind.RECORDED:
            logprobs.append({"key": one.turn_id, "logprobs": policy.logprobs})
    if versions:
        connection.execute(_SET_VERSION, versions)
    if logprobs:
        connection.execute(_SET_LOGPROBS, logprobs)


def hint_hash(hint: str) -> str:
    """The part of a score's key that identifies its hint."""
    return hashlib.sha256(hint.encode("utf-8", "surrogatepass")).hexdigest()


def drop_op(
    connection: Connection, owner: str, turn_id: str, reason: DropReason, detail: str, now: float
) -> TurnState | None:
    """judging, scoring or leased -> dropped(reason), or ready without its hint if `reason` concerns
    only that (records/queue/hintless.py); None if the turn is not held by `owner`. If its hint
    agrees with its answer, it is no longer a source of that hint. A turn that has trained before
    stays trained, and trains no more.
    """
    if to_trained(
        connection, now, TurnRow.turn_id == turn_id, TurnRow.claim_owner == owner, ends=True
    ):
        return TurnState.TRAINED
    if reason in OF_THE_HINT and holds(connection, TurnState.SCORING, owner, turn_id):
        if reason is DropReason.HINT_AGREES:
            take_back(connection, [turn_id], now)
        if go_on_without_hint(connection, [turn_id], now):
            return TurnState.READY
    changed = connection.execute(
        update(TurnRow)
        .where(
            TurnRow.turn_id == turn_id,
            TurnRow.claim_owner == owner,
            TurnRow.state.in_((*CLAIMABLE, TurnState.LEASED)),
        )
        .values(
            state=TurnState.DROPPED,
            drop_reason=reason,
            drop_detail=detail or None,
            priority=late_no_more(),
            claim_owner=None,
            claim_until=None,
            updated_at=now,
        )
    )
    return TurnState.DROPPED if changed.rowcount else None
