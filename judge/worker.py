"""The judge stage: turn -> votes -> verdict, committed to the store.

Sits between the proxy, which stored the turn's next state, and teacher scoring, which needs the
hints; a turn with a reward alone skips scoring and goes to the trainer. All failures of the judge
itself are left to the claim loop's patience (rollout_bridge/worker.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from openai import AsyncOpenAI

from judge.config import JudgeConfig
from judge.metrics import HintMetrics
from judge.votes.asking import JudgeUnavailable, ask
from judge.votes.calls import judge_client
from judge.votes.capacity import Capacity
from judge.votes.context import (
    NO_CONTROL_TEXTS,
    CountTokens,
    JudgePrompt,
    estimate_tokens,
    fit_judge_prompt,
)
from judge.votes.decision import decide, is_reviewed
from judge.votes.recorded import NAME as RECORDED_VOTES
from judge.votes.recorded import recorded_ballot
from judge.votes.screening import Evidence, screened
from judge.votes.voting import Ballot
from records.names import DropReason, TurnState
from records.queue.freshness import Freshness
from records.types import TurnRecord, Verdict, Vote
from rollout_bridge import tracing
from rollout_bridge.rendering.control_text import ControlTexts
from rollout_bridge.scoring.fresh_claims import FreshClaims, FreshStore
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

logger = logging.getLogger(__name__)


class JudgeStore(FreshStore, Protocol):
    """What the judge worker needs from the store."""

    async def commit_verdict(
        self,
        owner: str,
        verdict: Verdict,
        drop: DropReason | None,
        num_reactions: int | None = None,
        *,
        review: bool = False,
    ) -> bool: ...


class JudgeWorker:
    """Judges turns in state `judging` until stopped.

    `owner` names the claims: unique among the workers that run at the same time. `count_tokens`
    counts a text with the judge's tokenizer (it is called from other threads); without one an
    estimate on the high side is used. `control_texts` are that tokenizer's. `freshness` tells which
    turns can still train: the others are judged in idle time, for their hint alone; without it, all
    are judged as if they could.
    """

    def __init__(
        self,
        store: JudgeStore,
        config: JudgeConfig,
        owner: str,
        *,
        count_tokens: CountTokens = estimate_tokens,
        control_texts: ControlTexts = NO_CONTROL_TEXTS,
        metrics: HintMetrics | None = None,
        freshness: Freshness | None = None,
    ) -> None:
        self._store, self._config, self._owner = store, config, owner
        self._count_tokens = count_tokens
        self._control_texts = control_texts
        self.metrics = metrics if metrics is not None else HintMetrics()
        self.capacity = Capacity()
        claims = store if freshness is None else self._fresh(store, freshness)
        self.loop = ClaimLoop(claims, self, owner=owner, config=config.loop)
        self.metrics.watch(self.capacity)
        self.metrics.unavailable.set_function(lambda: self.loop.failures_in_a_row)
        self._client: AsyncOpenAI | None = None

    def _fresh(self, store: JudgeStore, freshness: Freshness) -> FreshClaims:
        return FreshClaims(
            store,
            freshness,
            concurrency=self._config.loop.concurrency,
            takes_late=True,
            # The teacher, and the trainer's search for a batch, take about as long again.
            latency_s=lambda: 2 * self.capacity.turn_s,
            on_look=self._looked,
        )

    def _looked(self, let_go: int, waiting_s: float | None) -> None:
        self.capacity.let_go(let_go)
        self.metrics.count_let_go(let_go, waiting_s)

    @property
    def state(self) -> TurnState:
        """The state from which turns are claimed."""
        return TurnState.JUDGING

    async def run(self, stop: asyncio.Event) -> None:
        """Judge until `stop` is set. See `ClaimLoop.run`."""
        async with judge_client(self._config) as client:
            self._client = client
            await self.loop.run(stop)

    async def process(self, turn: TurnRecord) -> None:
        """Vote on one turn and commit the verdict. Raises JudgeUnavailable if no vote got an
        answer.
        """
        begun, began = time.monotonic(), time.time()
        recording = turn.recording
        if recording is not None and recording.votes is not None:
            ballot = recorded_ballot(recording.votes)
            await self._commit(turn, ballot, 0, None, began, RECORDED_VOTES)
            return
        if recording is not None and self._config.recorded_votes_only:
            reason = DropReason.NO_RECORDED_VOTES
            await self._commit(turn, None, 0, reason, began, RECORDED_VOTES)
            return
        assert self._client is not None, "process is called by run"
        asked = await ask(
            self._client,
            self._config,
            partial(self._prompt, turn),
            self._count_tokens,
            routing_key=turn.session_id,
        )
        if asked.too_long is not None:
            logger.info("turn %s: %s", turn.turn_id, asked.too_long)
            reason = DropReason.JUDGE_PROMPT_TOO_LONG
            await self._commit(turn, asked.ballot, asked.num_omitted, reason, began)
            return
        assert asked.ballot is not None
        self.metrics.cached_tokens.inc(asked.ballot.cached_tokens)
        await self._commit(turn, asked.ballot, asked.num_omitted, None, began)
        if recording is None and not turn.for_hint_alone:
            self.capacity.judged(time.monotonic() - begun)

    def _prompt(self, turn: TurnRecord, max_tokens: int) -> JudgePrompt:
        return fit_judge_prompt(
            turn.messages,
            turn.tools,
            turn.response,
            turn.next_state,
            max_tokens,
            self._count_tokens,
            self._control_texts,
        )

    async def give_up(self, turn: TurnRecord, error: ServiceUnavailable) -> None:
        """Drop a turn that the judge never answered; its failed votes are stored."""
        ballot = error.ballot if isinstance(error, JudgeUnavailable) else None
        num_omitted = error.num_omitted if isinstance(error, JudgeUnavailable) else 0
        votes = ballot.votes if ballot is not None else ()
        known = [vote.latency_s for vote in votes if vote.latency_s is not None]
        began = time.time() - max(known, default=0.0)
        await self._commit(turn, ballot, num_omitted, DropReason.JUDGE_UNAVAILABLE, began)

    def _screened(self, turn: TurnRecord, votes: Sequence[Vote]) -> tuple[Vote, ...]:
        # Called in a thread: reading a long next state would hold up the other turns.
        return screened(votes, Evidence.of_turn(turn), self._config)

    async def _commit(
        self,
        turn: TurnRecord,
        ballot: Ballot | None,
        num_omitted: int,
        drop: DropReason | None,
        began: float,
        judge: str | None = None,
    ) -> None:
        votes = ballot.votes if ballot is not None else ()
        if any(vote.score == 1 and vote.hint for vote in votes):
            votes = await asyncio.to_thread(self._screened, turn, votes)
        verdict, drop = decide(
            turn.turn_id,
            votes,
            self._config,
            num_omitted=num_omitted,
            drop=drop,
            said=turn.feedback_reward,
            judge=judge,
        )
        review = is_reviewed(turn.turn_id, self._config)
        if await self._store.commit_verdict(
            self._owner, verdict, drop, turn.num_reactions, review=review
        ):
            if drop is None and turn.for_hint_alone and not (review and verdict.hint):
                drop = DropReason.HINT_ONLY  # as the store has marked it
            self.metrics.count(verdict, drop)
            if tracing.is_on():
                _trace(verdict, drop, began)
        else:
            logger.warning(
                "turn %s: the claim was lost or feedback came; its verdict is not kept",
                turn.turn_id,
            )


def _trace(verdict: Verdict, drop: DropReason | None, began: float) -> None:
    """The votes and the verdict as spans, without a word of them. Only how long a vote took is
    known, not when it was asked: each is shown from the beginning.
    """
    for vote in verdict.votes:
        if vote.latency_s is None:
            continue
        said: tracing.Attributes = {"opd.vote": vote.index}
        if vote.score is not None:
            said["opd.score"] = vote.score
        if vote.error is not None:
            said["opd.failed"] = True
        for name, number in (("input", vote.prompt_tokens), ("output", vote.completion_tokens)):
            if number is not None:
                said[f"gen_ai.usage.{name}_tokens"] = number
        tracing.turn_span(verdict.turn_id, "vote", began, said, began + vote.latency_s)
    found: tracing.Attributes = {
        "opd.votes": len(verdict.votes),
        "opd.accepted": bool(verdict.hint),
    }
    if drop is not None:
        found["opd.drop_reason"] = drop.value
    tracing.turn_span(verdict.turn_id, "judge", began, found)
