"""Carriers -> rows with views of their turns, and a step about which nothing is known yet.

It knows each turn's records, verdicts and scores, and how turns compare by reward. It does not know
the policy's log-probs, nor other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout_bridge.slime.carrier import BatchFacts, CarriedTurn, RowCarrier
from trainer.batch.comparisons import RewardFacts
from trainer.batch.reward_view import RewardView
from trainer.batch.views import TeachingPlan, TurnView, teach, unteachable, view_turn
from trainer.config import TrainerConfig
from trainer.objectives.batch import NO_STATISTICS, GlobalCounts
from trainer.slime.rows import RowState, Step, filler_view


def new_step(
    rollout_data: dict[str, Any], carriers: Sequence[RowCarrier], trainer: TrainerConfig
) -> Step:
    """A step about which nothing is known yet."""
    return Step(
        trainer=trainer,
        counts=GlobalCounts(turns=0, sequences=0, tokens=0.0),
        statistics=NO_STATISTICS,
        scale=float(rollout_data["global_batch_sizes"][0]),
        num_rows=len(carriers),
        comparable_share=0.0,
        advantage_sum=0.0,
    )


def device_of(rollout_data: dict[str, Any]) -> torch.device:
    """Where slime's tensors are. Raises ValueError if it has not computed log-probs."""
    student = rollout_data.get("log_probs")
    if not student:
        raise ValueError(
            "slime did not compute log_probs before the step: set --get-mismatch-metrics, or use "
            "the loss type custom_loss"
        )
    return student[0].device


def compared(facts: BatchFacts, start_kls: Sequence[float] | None) -> list[RewardFacts]:
    """What a reward rule reads of each turn of the whole batch; `start_kls` are the nats that a
    reward is charged for.
    """
    kls = [None] * len(facts.turns) if start_kls is None else start_kls
    return [
        RewardFacts(
            reward=one.reward,
            step_index=one.step_index,
            prompt_key=one.prompt_key,
            length=one.num_tokens,
            turn_id=one.turn_id,
            is_cut=one.is_cut,
            history=one.history,
            start_kl=start_kl,
            session_id=one.session_id,
            session=one.session,
        )
        for one, start_kl in zip(facts.turns, kls, strict=True)
    ]


def row_states(
    args: Any,
    rollout_data: dict[str, Any],
    carriers: Sequence[RowCarrier],
    step: Step,
    rewards: RewardView,
) -> list[RowState]:
    """The rows of this rank; `rewards` is what those say of the whole batch. Raises ValueError for
    a turn that cannot train.
    """
    device = device_of(rollout_data)
    plan = TeachingPlan(
        options=step.trainer.objective,
        model=None,
        vocab_size=args.vocab_size,
        max_tokens=0,
        device=device,
        side_source=step.trainer.side_source,
    )
    view_of = _viewer(rewards, plan, step.trainer.lesson_hold_weight)
    states = []
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for index, (carrier, (total, response)) in enumerate(zip(carriers, lengths, strict=True)):
        views = tuple(view_of(turn) for turn in carrier.turns)
        states.append(
            RowState(
                index=index,
                carrier=carrier,
                views=views or (filler_view(response, plan.support_size, device),),
                total_length=total,
                response_length=response,
                step=step,
            )
        )
    return states


def _viewer(
    rewards: RewardView, plan: TeachingPlan, hold_weight: float
) -> Callable[[CarriedTurn], TurnView]:
    """A function that makes the view of a turn of this batch."""

    def view(turn: CarriedTurn) -> TurnView:
        reason = unteachable(turn.sample, plan)
        if reason is not None:
            raise ValueError(
                f"turn {turn.sample.turn_id} cannot train ({reason}); such turns must be dropped "
                "when they are leased"
            )
        taught = teach([turn.sample], plan, None)[0]
        place = turn.index
        return view_turn(
            turn.sample,
            taught,
            rewards.advantages[place],
            rewards.eligible[place],
            turn.version_gap,
            plan.options,
            hold_weight,
        )

    return view
