"""The store's methods for the judge and scoring workers: claims of turns, and their results."""

from __future__ import annotations

from collections.abc import Sequence

from records.errors import UnknownTurn
from records.names import DropReason, TurnState
from records.queue import claims, scores, side_samples, waiting
from records.queue import freshness as freshnesses
from records.queue.freshness import Freshness, Horizon
from records.store.base import StoreBase
from records.tables import loading
from records.types import PolicyScore, Score, SideSamples, TurnRecord, Verdict


class WorkerStore(StoreBase):
    """Claims of turns, verdicts and scores."""

    async def claim(
        self,
        state: TurnState,
        *,
        owner: str,
        limit: int,
        ttl_s: float,
        oldest_version: int | None = None,
    ) -> list[TurnRecord]:
        """Claim up to `limit` turns in `judging` or `scoring` for `ttl_s` seconds.

        Round robin by scope; in a scope the newest first (of recordings the oldest), turns of one
        session together; live ones with tokens of a version before `oldest_version` are left out.
        Claims past their deadline are free again.
        """
        if state not in waiting.CLAIMABLE:
            raise ValueError(f"turns in state {state} are not claimed by workers")
        if limit < 1:
            raise ValueError(f"a claim asks for at least one turn, got {limit}")
        if not await self.read(waiting.any_free, state=state, now=self._clock()):
            return []
        taken = await self.write(
            waiting.claim_op,
            state=state,
            owner=owner,
            limit=limit,
            now=self._clock(),
            ttl_s=ttl_s,
            after=self.last_scopes.get(state, ""),
            oldest_version=oldest_version,
        )
        self.last_scopes[state] = taken.last_scope
        return await self.read(loading.load_turns, turn_ids=taken.turn_ids, skip_unknown=True)

    async def claim_late(self, *, owner: str, limit: int, ttl_s: float) -> list[TurnRecord]:
        """Claim up to `limit` turns that were dropped as `over_capacity`, newest first: they are
        `judging` again, but only for their hint.
        """
        if not await self.read(waiting.any_late, now=self._clock()):
            return []
        taken = await self.write(
            waiting.claim_late_op, owner=owner, limit=limit, now=self._clock(), ttl_s=ttl_s
        )
        return await self.read(loading.load_turns, turn_ids=taken.turn_ids, skip_unknown=True)

    async def horizon(self, freshness: Freshness, latency_s: float | None) -> Horizon | None:
        """The oldest version whose turns can train in the next step (`latency_s` None), or if they
        are ready `latency_s` from now; None if all can.
        """
        return await self.read(
            freshnesses.horizon, freshness=freshness, latency_s=latency_s, now=self._clock()
        )

    async def let_go(self, state: TurnState, horizon: Horizon) -> int:
        """Waiting live turns before the horizon -> dropped: in `judging` as over_capacity, in
        `scoring` as stale. Returns how many, at most `waiting.LET_GO_AT_A_TIME`.
        """
        if not await self.read(waiting.any_past, state=state, horizon=horizon, now=self._clock()):
            return 0
        return await self.write(waiting.let_go_op, state=state, horizon=horizon, now=self._clock())

    async def waiting_for_s(self, state: TurnState) -> float | None:
        """Age of the oldest live turn that waits in `state`, in seconds; None if there is none."""
        since = await self.read(waiting.waiting_since, state=state)
        return None if since is None else max(self._clock() - since, 0.0)

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> int:
        """Hold claims for another `ttl_s` from now; returns how many are still the owner's."""
        until = self._clock() + ttl_s
        return await self.write(claims.extend_op, owner=owner, turn_ids=turn_ids, until=until)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> int:
        """Give claims back; returns how many were still the owner's."""
        return await self.write(claims.release_op, owner=owner, turn_ids=turn_ids)

    async def commit_verdict(
        self,
        owner: str,
        verdict: Verdict,
        drop: DropReason | None,
        num_reactions: int | None = None,
        *,
        review: bool = False,
    ) -> bool:
        """judging -> scoring, ready (a reward and no hint), or dropped(drop), or, if it was
        claimed by `claim_late` and has a hint or reward, dropped(hint_only). With `review` a turn
        with a hint is reviewing instead, and its hint enters the memory when a person approves it.

        False, and nothing written, if the claim is lost, or if the turn has more than the
        `num_reactions` that were judged: then it is judged again. Raises ValueError for a verdict
        without a hint, a reward (or an outcome to come) and a drop reason.
        """
        is_rewarded = verdict.reward is not None or verdict.awaits_outcome
        if drop is None and not verdict.hint and not is_rewarded:
            raise ValueError(f"turn {verdict.turn_id}: no hint and no drop reason")
        judged = claims.JudgedTurn(
            owner=owner,
            verdict=verdict,
            drop=drop,
            now=self._clock(),
            num_reactions=num_reactions,
            review=review,
        )
        return await self.writer.run_bulk(claims.verdict_op, judged, "verdict")

    async def commit_scores(
        self,
        owner: str,
        wanted: Sequence[Score],
        candidates: tuple[str, ...] | None = None,
        policy: PolicyScore | None = None,
        side_samples: SideSamples | None = None,
    ) -> bool:
        """scoring -> ready, or dropped(held_out), with the scores of all candidates of one turn, by
        one teacher, and the `policy`'s own score, which turns of recordings need. `side_samples`,
        scored under the first candidate's hint, take the place of those that the turn had.

        False, and nothing is written, if the claim is lost, or if the turn's hints are no longer
        `candidates`. Raises ValueError unless each score has one finite log-prob per response id,
        or is UNSCORED, and side samples stand at each of them.
        """
        of = [*wanted, policy] if policy is not None else list(wanted)
        if len({one.turn_id for one in of}) != 1:
            raise ValueError(
                "a commit has the scores of exactly one turn, under at least one candidate"
            )
        turn_id, now = of[0].turn_id, self._clock()
        try:
            prompt_ids, response_ids = await self.read(loading.turn_tokens, turn_id=turn_id)
        except UnknownTurn:  # deleted while it was scored
            return False
        rows = scores.score_rows(wanted, prompt_ids, response_ids, now)
        if side_samples is not None:
            side_samples.check(turn_id, len(response_ids))
        scored = claims.ScoredTurn(
            owner=owner,
            turn_id=turn_id,
            rows=rows,
            now=now,
            candidates=candidates,
            policy=scores.checked_policy(policy, response_ids),
            side_samples=side_samples,
        )
        return await self.writer.run_bulk(claims.score_op, scored, "score")

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """A claimed or leased turn -> dropped(reason), or ready without its hint: see `let_go_of`.
        False if it is not the owner's.
        """
        return await self.let_go_of(owner, turn_id, reason, detail) is not None

    async def let_go_of(
        self, owner: str, turn_id: str, reason: DropReason, detail: str = ""
    ) -> TurnState | None:
        """A claimed or leased turn -> dropped(reason), or ready without its hint if the reason
        concerns only that and it has a reward. Returns its state now; None if it is not the
        owner's.
        """
        return await self.write(
            claims.drop_op,
            owner=owner,
            turn_id=turn_id,
            reason=reason,
            detail=detail,
            now=self._clock(),
        )

    async def save_side_samples(self, turn_id: str, samples: SideSamples) -> None:
        """Keep side samples of a turn, in place of earlier ones, in whatever state it is.

        Raises UnknownTurn, and ValueError unless they stand at each of its response tokens.
        """
        await self.write(side_samples.save_op, turn_id=turn_id, samples=samples, now=self._clock())
