"""The win rate on recorded states: does the hinted teacher prefer a version's new answers?

At stored turns that earned a hint, two versions answer the ORIGINAL prompt again; the teacher that
has read the hint scores both answers, and the one with the higher mean log-probability per token
wins the state (a tie is half a win). It is the teacher's own preference, towards which training
moves the policy, not an independent judge's: docs/evaluation.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opd.evaluation.attempts import Progress, ServedPolicy, gather_counted, sample_seed
from records.names import TurnState
from records.store import Store
from records.types import Ids, TurnRecord
from rollout_bridge.bootstrap import Estimate, mean_estimate
from rollout_bridge.engine.errors import EngineLogprobError
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.hinting import HintingError, as_requested, hinted_prompt_ids
from rollout_bridge.scoring.scoring import check_scores
from rollout_bridge.scoring.teachers import FrozenTeacher, Teachers
from trainer.errors import StartupError

UNKNOWN_TEACHER = "unknown_teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A recorded prompt with its hinted form; `max_new_tokens` fits the teacher's context."""

    turn: TurnRecord
    hinted_ids: Ids
    teacher: FrozenTeacher
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One state's outcome: `wins` in [0, 1], `difference` in nats per token, mean numbers of tokens
    of the version's answers and of the other's.
    """

    turn_id: str
    session_id: str
    was_trained: bool
    wins: float
    difference: float
    tokens: float
    tokens_against: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate:
    """All contests, their win rate and mean difference with intervals clustered by session, and
    the states that were left out, by reason.
    """

    contests: tuple[Contest, ...]
    wins: Estimate
    difference: Estimate
    left_out: Mapping[str, int]


async def hinted_turns(store: Store, count: int, seed: int) -> list[TurnRecord]:
    """`count` turns with a hint, turns held out of training first, drawn by the seed.

    Raises StartupError if there is none.
    """
    turn_ids = await store.hinted_turn_ids()
    if not turn_ids:
        raise StartupError(
            "no recorded turn has a hint: there is no state to compare answers at; let the judge "
            "work first (opd serve)"
        )
    held_out = set(await store.held_out_turns())
    drawn = sorted(turn_ids, key=lambda one: (one not in held_out, _place(seed, one)))[:count]
    return await store.turns(drawn)


def _place(seed: int, turn_id: str) -> str:
    return hashlib.blake2b(f"{seed}/{turn_id}".encode(), digest_size=8).hexdigest()


async def prepare_states(
    turns: Iterable[TurnRecord], rendering: Rendering, teachers: Teachers
) -> tuple[list[State], Counter[str]]:
    """The turns whose hint has a place in the prompt, and the others by reason."""
    states: list[State] = []
    left_out: Counter[str] = Counter()
    for turn in turns:
        teacher = teachers.of(turn.teacher_key)
        if teacher is None:
            left_out[UNKNOWN_TEACHER] += 1
            continue
        limit = await teacher.max_tokens()
        assert turn.hint is not None
        try:
            hinted = hinted_prompt_ids(
                as_requested(rendering, turn.sampling),
                turn.messages,
                turn.tools,
                turn.prompt_ids,
                turn.hint,
                limit - 1,
            )
        except HintingError as error:
            left_out[error.reason.value] += 1
            continue
        room = int(turn.sampling.get("max_new_tokens", SamplingParams().max_new_tokens))
        room = min(room, limit - max(len(hinted), len(turn.prompt_ids)))
        states.append(
            State(turn=turn, hinted_ids=hinted, teacher=teacher, max_new_tokens=max(room, 1))
        )
    return states, left_out


def check_states(states: Sequence[State], left_out: Mapping[str, int]) -> None:
    """Raises StartupError, which says why, if no state is left."""
    if not states:
        why = ", ".join(f"{reason}: {number}" for reason, number in left_out.items())
        raise StartupError(f"no recorded state can be scored under its hint ({why})")


async def sample_states(
    policy: ServedPolicy, states: Sequence[State], *, samples: int, seed: int, progress: Progress
) -> list[list[Ids]]:
    """`samples` answers to each state's original prompt, as ids, the stop token included."""

    async def one(state: State, sample: int) -> Ids:
        params = SamplingParams(
            max_new_tokens=state.max_new_tokens,
            stop=tuple(state.turn.sampling.get("stop", ())),
            seed=sample_seed(seed, state.turn.turn_id, sample),
        )
        return (await policy.sample(state.turn.prompt_ids, params)).output_ids

    work = [one(state, sample) for state in states for sample in range(samples)]
    flat = await gather_counted(work, progress)
    return [flat[start : start + samples] for start in range(0, len(flat), samples)]


async def score_states(
    states: Sequence[State], answers: Sequence[Sequence[Ids]], progress: Progress
) -> list[list[float]]:
    """The hinted teacher's mean log-probability per token of each answer, at temperature 1.

    Raises EngineError, TeacherChanged.
    """

    async def one(state: State, answer: Ids) -> float:
        found = await state.teacher.score(
            state.hinted_ids, answer, routing_key=state.turn.session_id
        )
        problem = check_scores(found.logprobs, len(answer))
        if problem is not None:
            raise EngineLogprobError(f"turn {state.turn.turn_id}: {problem[1]}")
        return float(np.mean(found.logprobs, dtype=np.float64))

    pairs = zip(states, answers, strict=True)
    work = [one(state, answer) for state, given in pairs for answer in given]
    flat = await gather_counted(work, progress)
    size = len(work) // len(states)
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def contest(
    turn: TurnRecord,
    scores: Sequence[float],
    scores_against: Sequence[float],
    answers: Sequence[Ids],
    answers_against: Sequence[Ids],
) -> Contest:
    """The outcome at one state: answer i meets answer i, which was sampled with the same seed."""
    gaps = [own - other for own, other in zip(scores, scores_against, strict=True)]
    return Contest(
        turn_id=turn.turn_id,
        session_id=turn.session_id,
        was_trained=turn.state is TurnState.TRAINED,
        wins=float(np.mean([0.5 if gap == 0 else float(gap > 0) for gap in gaps])),
        difference=float(np.mean(gaps)),
        tokens=float(np.mean([len(ids) for ids in answers])),
        tokens_against=float(np.mean([len(ids) for ids in answers_against])),
    )


def win_rate(contests: Sequence[Contest], left_out: Mapping[str, int], seed: int) -> WinRate:
    """The means over all states. Raises ValueError for none."""
    sessions = [one.session_id for one in contests]
    return WinRate(
        contests=tuple(contests),
        wins=mean_estimate([one.wins for one in contests], sessions, seed=seed, bounds=(0.0, 1.0)),
        difference=mean_estimate([one.difference for one in contests], sessions, seed=seed),
        left_out=dict(left_out),
    )
