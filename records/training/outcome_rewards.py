"""A session's outcome, as a reward for each of its turns.

    r_t = o,  or  r_t = o + v_t               o in [-1, 1], v_t the judge's reward of turn t

The second is the source's step-wise reward (ALGORITHMS 3.3). A turn whose session has no outcome
has no reward: a missing reward is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from records.types import PastAnswer, PromptHistory, ReadySample

OutcomeReward: TypeAlias = Literal["only", "add"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRewards:
    """Rewards are made from outcomes, alone (`only`) or plus the judge's reward (`add`); turns wait
    for theirs, at most `wait_s` after their verdict. If none comes, a hint trains alone if
    `hints_train`.
    """

    kind: OutcomeReward
    wait_s: float
    hints_train: bool = True


def as_reward(outcome: float) -> float:
    """An outcome in [0, 1] on the scale of every reward, [-1, 1]."""
    return 2.0 * outcome - 1.0


def step_reward(outcome: float | None, said: float | None, kind: OutcomeReward) -> float | None:
    """The reward of a turn whose session has this `outcome`; `said` is the judge's reward (None: it
    abstained). None without an outcome.
    """
    if outcome is None:
        return None
    return as_reward(outcome) + (0.0 if kind == "only" or said is None else said)


def rewarded(sample: ReadySample, kind: OutcomeReward) -> ReadySample:
    """The sample and earlier answers to its prompt, with their sessions' outcomes in their rewards;
    answers of sessions without an outcome are left out.
    """
    history = sample.history
    return replace(
        sample,
        reward=step_reward(sample.session.outcome, sample.reward, kind),
        history=PromptHistory(
            recent=_with_outcomes(history.recent, kind), first=_with_outcomes(history.first, kind)
        ),
    )


def _with_outcomes(answers: tuple[PastAnswer, ...], kind: OutcomeReward) -> tuple[PastAnswer, ...]:
    rewards = [(one, step_reward(one.outcome, one.reward, kind)) for one in answers]
    return tuple(replace(one, reward=reward) for one, reward in rewards if reward is not None)
