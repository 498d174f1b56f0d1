"""The teacher stage: the log-probabilities of exactly the sampled ids, under the hinted prompts.

Takes turns that the judge gave hints, builds a hinted prompt as ids for each candidate
(hinting.py), and asks a frozen teacher (teachers.py) for its log-probs, at temperature 1, of hinted
prompt ids ++ response ids: concatenated ids, never text (ALGORITHMS 1.6, 1.7). What does not fit
exactly is dropped with a reason. Prompts of one session begin alike, so its turns are scored one
after another and on one server: each finds in the cache what the one before computed. Knows no
judge and no objective.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from records.names import DropReason, TurnState
from records.queue.freshness import Freshness
from records.turns.recording import RecordingKind
from records.types import (
    UNSCORED,
    Ids,
    Logprobs,
    PolicyScore,
    Score,
    SideSamples,
    TurnRecord,
)
from rollout_bridge import tracing
from rollout_bridge.config import ScoringConfig
from rollout_bridge.engine.errors import (
    EngineError,
    EngineLogprobError,
    EngineProtocolError,
    EngineRejected,
    ForeignTokens,
)
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.fresh_claims import FreshClaims, FreshStore
from rollout_bridge.scoring.hinting import HintingError, as_requested, hinted_prompt_ids
from rollout_bridge.scoring.policy_scores import PolicyScorer
from rollout_bridge.scoring.scoring_metrics import ScoringMetrics
from rollout_bridge.scoring.teachers import FrozenTeacher, Teacher, TeacherChanged, Teachers
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

__all__ = [
    "ScoringStore",
    "ScoringWorker",
    "Teacher",
    "TeacherChanged",
    "check_scores",
    "fault_of",
    "scores_problem",
]

logger = logging.getLogger(__name__)

RewriteHint: TypeAlias = Callable[[TurnRecord, str], str | None]

_TOO_LONG = re.compile(r"context|too long|longer than|exceed", re.I)
_FOREIGN = re.compile(r"vocabulary|vocab_size|valid range is \[0, ", re.I)


class ScoringStore(FreshStore, Protocol):
    """What scoring needs from the store."""

    async def commit_scores(
        self,
        owner: str,
        wanted: Sequence[Score],
        candidates: tuple[str, ...] | None = None,
        policy: PolicyScore | None = None,
        side_samples: SideSamples | None = None,
    ) -> bool: ...
    async def let_go_of(
        self, owner: str, turn_id: str, reason: DropReason, detail: str = ""
    ) -> TurnState | None: ...


class SideSampling(Protocol):
    """Makes side samples for a trainer that cannot draw them."""

    async def make(
        self, turn: TurnRecord, teacher: FrozenTeacher, score: Score
    ) -> tuple[SideSamples, int]:
        """Those of a turn, scored by `teacher` under the hint of `score`; how many requests the
        policy answered for them. Raises HintingError, EngineError, ServiceUnavailable,
        TeacherChanged.
        """
        ...


class Resampler(Protocol):
    """Replaces a recorded turn with a sample of the policy."""

    async def process(self, owner: str, turn: TurnRecord) -> bool:
        """False if the claim was lost. Raises EngineError, changing nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _HintedPrompt:
    """A candidate's prompt; its hint is "" if a control left the hint out."""

    candidate: int
    hint: str
    ids: Ids


class ScoringWorker:
    """Scores turns in state `scoring` until stopped.

    `owner` names the claims: unique among the workers that run at a time. `rewrite_hint` is for
    controls: it returns the hint to score with instead, or None to score under the original prompt
    (stored as the hint ""). `teacher` is the run's own; the worker opens the others that the
    configuration names. Recorded turns need `policy`, whose log-probs stand in for those of whoever
    sampled them; with a `resampler` the policy answers their prompts again instead. `side_sampler`
    makes side samples of each turn that is scored, for an objective that needs them and a trainer
    that cannot draw them. Turns that can no longer train according to `freshness` are dropped as
    stale before a teacher is asked.
    """

    def __init__(
        self,
        store: ScoringStore,
        teacher: Teacher,
        rendering: Rendering,
        config: ScoringConfig,
        owner: str,
        *,
        rewrite_hint: RewriteHint | None = None,
        metrics: ScoringMetrics | None = None,
        policy: PolicyScorer | None = None,
        resampler: Resampler | None = None,
        side_sampler: SideSampling | None = None,
        freshness: Freshness | None = None,
    ) -> None:
        self._store, self._rendering = store, rendering
        self._config, self._owner, self._rewrite_hint = config, owner, rewrite_hint
        self._policy, self._resampler, self._side_sampler = policy, resampler, side_sampler
        self._teachers = Teachers(teacher, config)
        self._sessions: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.metrics = metrics if metrics is not None else ScoringMetrics()
        claims = store if freshness is None else self._fresh(store, freshness)
        self.loop = ClaimLoop(claims, self, owner=owner, config=config.loop)
        self.metrics.unavailable.set_function(lambda: self.loop.failures_in_a_row)

    def _fresh(self, store: ScoringStore, freshness: Freshness) -> FreshClaims:
        return FreshClaims(
            store,
            freshness,
            concurrency=self._config.loop.concurrency,
            takes_late=False,
            latency_s=None,
            on_look=lambda let_go, _: self.metrics.count_dropped(DropReason.STALE, let_go),
        )

    @property
    def state(self) -> TurnState:
        """The state from which turns are claimed."""
        return TurnState.SCORING

    async def run(self, stop: asyncio.Event) -> None:
        """Score until `stop` is set. Raises TeacherChanged; see also `ClaimLoop.run`."""
        try:
            await self.loop.run(stop)
        finally:
            await self._teachers.close()

    async def process(self, turn: TurnRecord) -> None:
        """Score one turn and commit, or drop it. Raises ServiceUnavailable, TeacherChanged."""
        teacher = self._teachers.of(turn.teacher_key)
        if teacher is None:
            detail = f"no teacher is called {turn.teacher_key!r}"
            await self._drop(turn, DropReason.UNKNOWN_TEACHER, detail)
            return
        is_recorded = (
            turn.recording is not None and turn.recording.kind is not RecordingKind.RESAMPLED
        )
        scores, policy, side, began = [], None, None, time.time()
        try:
            if is_recorded and self._resampler is not None and turn.candidates:
                await self._resample(turn, self._resampler)
                return
            if is_recorded:
                policy = await self._policy_score(turn)
            if policy is None or turn.candidates:
                scores = await self._scores(turn, teacher)
                side = await self._side_samples(turn, teacher, scores)
        except (HintingError, EngineError) as error:
            await self._drop(turn, *fault_of(error))
            found: tracing.Attributes = {"opd.drop_reason": fault_of(error)[0].value}
        else:
            await self._commit(turn, scores, policy, side)
            found = {"opd.teacher": teacher.name, "opd.candidates": len(scores)}
        tracing.turn_span(turn.turn_id, "score", began, found)

    async def give_up(self, turn: TurnRecord, error: ServiceUnavailable) -> None:
        """Drop a turn that the teacher never scored."""
        await self._drop(turn, DropReason.TEACHER_UNAVAILABLE, str(error))

    async def _resample(self, turn: TurnRecord, resampler: Resampler) -> None:
        if not await resampler.process(self._owner, turn):
            logger.warning("turn %s: the claim was lost; its sample is not kept", turn.turn_id)

    async def _policy_score(self, turn: TurnRecord) -> PolicyScore:
        if self._policy is None:
            raise ServiceUnavailable("a recorded turn, and no policy engine to score it")
        ids = np.concatenate([turn.prompt_ids, turn.response_ids])
        # As with the teacher, what turns of a session share is computed once.
        async with self._sessions.setdefault(turn.session_id, asyncio.Lock()):
            try:
                return await self._policy.score(turn, ids)
            except EngineProtocolError as error:
                # The policy's fault, which must not be reported as the teacher's.
                raise HintingError(DropReason.ROLLOUT_LOGPROBS_INVALID, str(error)) from error

    async def _scores(self, turn: TurnRecord, teacher: FrozenTeacher) -> list[Score]:
        """A score for each candidate."""
        is_asked = self._config.engine_scores
        limit = await teacher.max_tokens() if is_asked else self._config.context_length
        # Rendering a long conversation takes long enough to hold up the other turns' calls.
        prompts = await asyncio.to_thread(
            self._prompts, turn, (limit or sys.maxsize) - len(turn.response_ids)
        )
        if not is_asked:
            return [_unscored(turn, teacher.name, prompt) for prompt in prompts]
        # One after another, so that an engine computes what the prompts share only once.
        async with self._sessions.setdefault(turn.session_id, asyncio.Lock()):
            scores = [await _scored(turn, teacher, prompt) for prompt in prompts]
            if not self._is_checked(turn):
                return scores
            plain = await teacher.score(
                turn.prompt_ids, turn.response_ids, routing_key=turn.session_id
            )
        problem = check_scores(plain.logprobs, len(turn.response_ids))
        if problem is not None:
            raise HintingError(*problem)
        return disagreeing(scores, plain.logprobs, self._config.least_fall)

    async def _side_samples(
        self, turn: TurnRecord, teacher: FrozenTeacher, scores: Sequence[Score]
    ) -> SideSamples | None:
        """Those of a turn that may train, under the hint that is selected."""
        is_held_out = turn.recording is not None and turn.recording.held_out
        if self._side_sampler is None or is_held_out:
            return None
        selected = min(scores, key=lambda one: one.candidate)
        async with self._sessions.setdefault(turn.session_id, asyncio.Lock()):
            side, requests = await self._side_sampler.make(turn, teacher, selected)
        self.metrics.side_requests.inc(requests)
        return side

    def _is_checked(self, turn: TurnRecord) -> bool:
        """Whether the answer is the one that the next state is about, and its hint the judge's."""
        is_resampled = turn.recording is not None and turn.recording.kind is RecordingKind.RESAMPLED
        return bool(self._config.least_fall) and not is_resampled and self._rewrite_hint is None

    def _prompts(self, turn: TurnRecord, max_tokens: int) -> list[_HintedPrompt]:
        """The prompts of the candidates that can be placed. Raises HintingError if none can."""
        assert turn.candidates, f"turn {turn.turn_id} is in scoring without a hint"
        prompts: dict[str, _HintedPrompt] = {}
        problems: list[HintingError] = []
        for candidate, written in enumerate(turn.candidates):
            hint = self._rewrite_hint(turn, written) if self._rewrite_hint else written
            if (hint or "") in prompts:
                continue  # a control made one hint of two
            try:
                ids = self._hinted(turn, hint, max_tokens)
            except HintingError as error:
                logger.info("turn %s, candidate %d: %s", turn.turn_id, candidate, error)
                problems.append(error)
            else:
                key = hint or ""
                prompts[key] = _HintedPrompt(candidate=candidate, hint=key, ids=ids)
        if not prompts:
            raise problems[0]
        return list(prompts.values())

    def _hinted(self, turn: TurnRecord, hint: str | None, max_tokens: int) -> Ids:
        """The prompt ids that carry `hint`, or the turn's own. Raises HintingError."""
        if hint is not None:
            rendering = as_requested(self._rendering, turn.sampling)
            return hinted_prompt_ids(
                rendering, turn.messages, turn.tools, turn.prompt_ids, hint, max_tokens
            )
        if len(turn.prompt_ids) > max_tokens:
            raise HintingError(
                DropReason.HINTED_PROMPT_TOO_LONG,
                f"{len(turn.prompt_ids)} ids, at most {max_tokens} fit",
            )
        return turn.prompt_ids

    async def _commit(
        self,
        turn: TurnRecord,
        scores: list[Score],
        policy: PolicyScore | None,
        side: SideSamples | None,
    ) -> None:
        problems = [_problem(score, len(turn.response_ids)) for score in scores]
        problem = next(filter(None, problems), None)
        if problem is not None:
            await self._drop(turn, *problem)
        elif await self._store.commit_scores(
            self._owner, scores, tuple(turn.candidates), policy, side
        ):
            self.metrics.count_scored(scores)
        else:
            logger.warning("turn %s: the claim was lost; its scores are not kept", turn.turn_id)

    async def _drop(self, turn: TurnRecord, reason: DropReason, detail: str) -> None:
        state = await self._store.let_go_of(self._owner, turn.turn_id, reason, detail)
        if state is None:
            logger.warning("turn %s: the claim was lost; it is not dropped", turn.turn_id)
            return
        if state is TurnState.READY:
            self.metrics.hintless.labels(reason=reason.value).inc()
        else:
            self.metrics.count_dropped(reason)
        logger.info("turn %s is %s, %s: %s", turn.turn_id, state.value, reason.value, detail)


async def _scored(turn: TurnRecord, teacher: FrozenTeacher, prompt: _HintedPrompt) -> Score:
    found = await teacher.score(prompt.ids, turn.response_ids, routing_key=turn.session_id)
    return Score(
        turn_id=turn.turn_id,
        hint=prompt.hint,
        teacher=teacher.name,
        teacher_version=found.version,
        hinted_prompt_ids=prompt.ids,
        teacher_logprobs=found.logprobs,
        latency_s=found.latency_s,
        candidate=prompt.candidate,
        topk_ids=found.topk_ids,
        topk_logprobs=found.topk_logprobs,
    )


def disagreeing(scores: Sequence[Score], plain: Logprobs, least_fall: float) -> list[Score]:
    """The scores whose hint makes a token of the answer less likely by `least_fall` nats than it is
    under `plain` [R], the same teacher's log-probs without a hint. If the first of `scores` is not
    among them, the one with the largest fall takes its place. An invalid score cannot be compared
    and stays: its turn is dropped for that. Raises HintingError if fewer than half are left: votes
    that ask for such different things have not read the turn.
    """
    falls = [fall_of(plain, one.teacher_logprobs) for one in scores]
    places = places_left(falls, least_fall)
    if not places:
        most = max(fall for fall in falls if fall is not None)
        raise HintingError(
            DropReason.HINT_AGREES,
            f"{_num_passing(falls, least_fall)} of {len(scores)} hints make a token less likely by "
            f"{least_fall:g} nats; at most {most:.2g}",
        )
    left = [scores[place] for place in places]
    if places[0] == 0:
        return left
    return [replace(one, candidate=place) for place, one in enumerate(left)]


def places_left(falls: Sequence[float | None], least: float) -> list[int]:
    """Which of a turn's candidates are left, by `fall_of` of each: those with at least `least`
    nats, in order. If the first is not among them, they are sorted by fall, largest first and
    unknown last. Empty if fewer than half are left.
    """
    if 2 * _num_passing(falls, least) < len(falls):
        return []
    places = [place for place, fall in enumerate(falls) if _passes(fall, least)]
    if places and places[0] != 0:
        places.sort(key=lambda place: _falling(falls[place]))
    return places


def _falling(fall: float | None) -> float:
    return math.inf if fall is None else -fall


def _num_passing(falls: Sequence[float | None], least: float) -> int:
    return sum(_passes(fall, least) for fall in falls)


def _passes(fall: float | None, least: float) -> bool:
    return fall is None or fall >= least


def fall_of(plain: Logprobs, hinted: Logprobs) -> float | None:
    """By how many nats the hint lowers the log-prob of the answer's token [R] that it lowers most;
    None if they cannot be compared.
    """
    if plain.shape != hinted.shape or not len(plain):
        return None
    fall = float(np.max(plain - hinted))
    return fall if np.isfinite(fall) else None


def _unscored(turn: TurnRecord, teacher: str, prompt: _HintedPrompt) -> Score:
    return Score(
        turn_id=turn.turn_id,
        hint=prompt.hint,
        teacher=teacher,
        teacher_version=UNSCORED,
        hinted_prompt_ids=prompt.ids,
        teacher_logprobs=np.full(len(turn.response_ids), np.nan, dtype=np.float32),
        latency_s=0.0,
        candidate=prompt.candidate,
    )


def fault_of(error: HintingError | EngineError) -> tuple[DropReason, str]:
    """Why what could not be built or scored is dropped.

    Raises ServiceUnavailable if the teacher is at fault: then it may be scored later.
    """
    if isinstance(error, HintingError):
        return error.reason, error.detail
    if isinstance(error, ForeignTokens):
        return DropReason.FOREIGN_TOKENS, str(error)
    if isinstance(error, EngineRejected):
        is_of_request = error.status in (400, 413, 422)
        if is_of_request and _FOREIGN.search(error.message):
            return DropReason.FOREIGN_TOKENS, str(error)
        if not is_of_request or not _TOO_LONG.search(error.message):
            raise ServiceUnavailable(f"the teacher refuses: {error}") from error
        return DropReason.HINTED_PROMPT_TOO_LONG, str(error)
    if isinstance(error, EngineLogprobError):
        return DropReason.TEACHER_LOGPROBS_INVALID, str(error)
    if isinstance(error, EngineProtocolError):
        return DropReason.TEACHER_MISALIGNED, str(error)
    raise ServiceUnavailable(str(error)) from error


def _problem(score: Score, num_response: int) -> tuple[DropReason, str] | None:
    """Why this score drops its turn, if it does: a bad log-prob drops the sample (ALGORITHMS
    0.1), whichever candidate has it.
    """
    if score.teacher_version == UNSCORED:
        return None
    return scores_problem(score.teacher_logprobs, score.topk_logprobs, num_response)


def scores_problem(
    teacher_logprobs: Logprobs, topk_logprobs: Logprobs | None, num_response: int
) -> tuple[DropReason, str] | None:
    """`check_scores` for the log-probs [R] of a response and for its top-k log-probs [R, K]."""
    problem = check_scores(teacher_logprobs, num_response)
    if problem is None and topk_logprobs is not None:
        return check_scores(topk_logprobs.ravel(), topk_logprobs.size)
    return problem


def check_scores(teacher_logprobs: Logprobs, num_response: int) -> tuple[DropReason, str] | None:
    """Why these scores [R] cannot be used, or None: one finite log-prob <= 0 per response id."""
    if teacher_logprobs.shape != (num_response,):
        return (
            DropReason.TEACHER_MISALIGNED,
            f"{teacher_logprobs.shape} log-probs for {num_response} response ids",
        )
    num_bad = int(np.count_nonzero(~np.isfinite(teacher_logprobs)))
    if num_bad:
        return DropReason.TEACHER_LOGPROBS_INVALID, f"{num_bad} of {num_response} are not finite"
    # Rounding can lift a certain token's log-prob a little above 0.
    if float(teacher_logprobs.max()) > 1e-3:
        return DropReason.TEACHER_LOGPROBS_INVALID, f"log-prob {teacher_logprobs.max()} > 0"
    return None
