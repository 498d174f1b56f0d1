"""The advantage hook's work: carriers -> views of turns -> corrections, denominators, advantages.

Everything that depends on the whole batch is settled here, before slime's first micro-batch: how
turns compare by reward, statistics of the gap, what correction takes out (and so what the loss
divides by), the guards. Ranks exchange a few numbers per token once.

One thing slime does not give at this point: log-probs at another temperature than 1. A turn that
was sampled at another one is corrected in the loss hook; what a rule rejects of it whole still
counts in denominators that count turns or rows.

Shapes: R tokens of a row's response, r those of them on this rank; B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollout_bridge.slime.carrier import BatchFacts, CarriedTurn, RowCarrier
from trainer.batch.collate import comparable
from trainer.batch.correction import Correction
from trainer.batch.reward_view import RewardFacts, eligible_turns, reward_advantages, reward_metrics
from trainer.batch.statistics import batch_statistics
from trainer.batch.teach import TeachingPlan, teach, unteachable
from trainer.batch.token_batch import BatchContext, assemble
from trainer.batch.turn_scores import TurnScores
from trainer.batch.views import TurnView, view_turn
from trainer.config import TrainerConfig
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.batch import (
    NO_STATISTICS,
    BatchStatistics,
    GlobalCounts,
    TokenBatch,
    select_finite,
)
from trainer.objectives.distributions.kl import distillation_advantage
from trainer.objectives.options import HindsightOpd
from trainer.objectives.policy.policy_gradient import advantages as policy_advantages
from trainer.slime.batch_metrics import TurnFigures, batch_metrics
from trainer.slime.checks import (
    RankFigures,
    check_complete,
    check_finite,
    check_taught,
    take_carriers,
)
from trainer.slime.ranks import Ranks
from trainer.slime.rows import (
    RowBatch,
    RowState,
    Step,
    attach,
    filler_view,
    joined,
    parted,
    row_batch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAdvantages:
    """What the hook puts into slime's rollout data: advantages [r] of each row, and metrics."""

    advantages: list[Tensor]
    metrics: dict[str, float]


@torch.no_grad()
def prepare(
    args: Any, rollout_data: dict[str, Any], trainer: TrainerConfig, ranks: Ranks
) -> RankAdvantages:
    """Advantages of this rank's rows; hangs a `RowState` on each row's `rollout_log_probs`.

    Takes the carriers out of `rollout_data["prompt"]`. Raises ValueError for data that do not fit
    each other, NonFiniteError and DistillationOffError as the embedded trainer does.
    """
    carriers = take_carriers(rollout_data)
    step = _new_step(rollout_data, carriers, trainer)
    states = _states(args, rollout_data, carriers, step)
    local = row_batch(states, rollout_data["loss_masks"], _device(rollout_data))
    before = joined(rollout_data["log_probs"], states, ranks)
    figures, assembled = _figures(local, before, states, step, ranks)
    clean, num_nonfinite = select_finite(assembled)
    everything = _agree(clean, num_nonfinite, figures, carriers, step, ranks)
    clean = replace(clean, statistics=step.statistics)
    weights_BT = _weights(clean, step)
    advantages_BT = _advantages(clean, trainer)
    comparable_BT = local.batch.spread(
        [torch.isfinite(view.rollout).float() for view in local.views], fill=0.0
    )
    shares = ranks.of_all(
        (weighted_sum(comparable_BT, weights_BT).item(), _moments(clean, advantages_BT))
    )
    step.comparable_share = sum(share for share, _ in shares)
    step.advantage_sum = float((advantages_BT.abs() * clean.mask_BT).sum())
    metrics = batch_metrics(
        everything.turns,
        carriers[0].batch,
        Correction(trainer.correction.settings()),
        moments=[moment for _, moment in shares],
        tokens=step.counts.tokens,
        num_nonfinite=everything.nonfinite,
    ) | reward_metrics(_compared(carriers[0].batch), trainer.objective)
    check_taught(metrics)
    if args.loss_type == "policy_loss":
        advantages_BT = advantages_BT * _row_scale(
            args, rollout_data, local, weights_BT, states, step
        )
    for values, state in zip(rollout_data["rollout_log_probs"], states, strict=True):
        attach(values, state)
    return RankAdvantages(
        advantages=parted(local.rows(advantages_BT), states, ranks), metrics=metrics
    )


def _device(rollout_data: dict[str, Any]) -> torch.device:
    student = rollout_data.get("log_probs")
    if not student:
        raise ValueError(
            "slime did not compute log_probs before the step: set --get-mismatch-metrics, or use "
            "the loss type custom_loss"
        )
    return student[0].device


def _new_step(
    rollout_data: dict[str, Any], carriers: Sequence[RowCarrier], trainer: TrainerConfig
) -> Step:
    """A step of which nothing is known yet."""
    return Step(
        trainer=trainer,
        counts=GlobalCounts(turns=0, sequences=0, tokens=0.0),
        statistics=NO_STATISTICS,
        scale=float(rollout_data["global_batch_sizes"][0]),
        num_rows=len(carriers),
        comparable_share=0.0,
        advantage_sum=0.0,
    )


def _agree(
    clean: TokenBatch,
    num_nonfinite: Tensor,
    figures: list[TurnFigures],
    carriers: Sequence[RowCarrier],
    step: Step,
    ranks: Ranks,
) -> RankFigures:
    """The figures of all ranks as one; sets the counts and statistics of `step`."""
    counts = GlobalCounts.of(clean.mask_BT, clean.turn_ids_BT)
    facts = carriers[0].batch
    own = RankFigures(facts, counts, figures, float(num_nonfinite))
    parts: list[RankFigures] = ranks.of_all(own)
    check_complete(parts, carriers)
    for part in parts:
        step.counts = step.counts + part.counts
    everything = RankFigures(
        facts,
        step.counts,
        [one for part in parts for one in part.turns],
        sum(part.nonfinite for part in parts),
    )
    check_finite(everything.nonfinite, step.counts.tokens, step.trainer)
    step.statistics = _statistics(step.trainer, everything.turns)
    return everything


def _compared(facts: BatchFacts) -> list[RewardFacts]:
    return [
        RewardFacts(
            reward=one.reward,
            step_index=one.step_index,
            prompt_key=one.prompt_key,
            length=one.num_tokens,
        )
        for one in facts.turns
    ]


def _states(
    args: Any,
    rollout_data: dict[str, Any],
    carriers: Sequence[RowCarrier],
    step: Step,
) -> list[RowState]:
    device = _device(rollout_data)
    facts = carriers[0].batch
    plan = TeachingPlan(
        options=step.trainer.objective,
        model=None,
        vocab_size=args.vocab_size,
        max_tokens=0,
        device=device,
    )
    compared = _compared(facts)
    rewards = reward_advantages(compared, plan.options)
    eligible = eligible_turns(compared, plan.options)

    def view(turn: CarriedTurn) -> TurnView:
        reason = unteachable(turn.sample, plan)
        if reason is not None:
            raise ValueError(
                f"turn {turn.sample.turn_id} cannot train ({reason}); such turns are to be dropped "
                "when they are leased"
            )
        taught = teach([turn.sample], plan, None)[0]
        place = turn.index
        return view_turn(
            turn.sample, taught, rewards[place], eligible[place], turn.version_gap, plan.options
        )

    states = []
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for index, (carrier, (total, response)) in enumerate(zip(carriers, lengths, strict=True)):
        views = tuple(view(turn) for turn in carrier.turns)
        views = views or (filler_view(response, plan.support_size, device),)
        states.append(
            RowState(
                index=index,
                carrier=carrier,
                views=views,
                total_length=total,
                response_length=response,
                step=step,
            )
        )
    return states


def _figures(
    local: RowBatch,
    before: Sequence[Tensor],
    states: Sequence[RowState],
    step: Step,
    ranks: Ranks,
) -> tuple[list[TurnFigures], TokenBatch]:
    """What other ranks need of this rank's turns, and these as the objective sees them before the
    step: rollout log-probs at another temperature than 1 cannot be compared here.
    """
    turns = [turn for state in states for turn in state.carrier.turns]
    places = [
        place
        for place, state in enumerate(state for state in states for _ in state.views)
        if state.carrier.turns
    ]
    views = list(local.views)
    for place, turn in zip(places, turns, strict=True):
        if comparable(turn.sample) and turn.sample.temperature != 1.0:
            view = views[place]
            views[place] = replace(view, rollout=torch.full_like(view.rollout, torch.nan))
    old_BT = local.columns(before)
    now = TokenLogprobs(
        logprobs_BT=old_BT, logprobs_sampled_BT=old_BT, entropy_BT=torch.zeros_like(old_BT)
    )
    context = BatchContext(
        views=views,
        before=None,
        correction=Correction(step.trainer.correction.settings()),
        whole=None,
        statistics=NO_STATISTICS,
    )
    assembled = assemble(local.batch, now, None, context).tokens
    old = local.batch.gather(old_BT)
    kept = local.batch.gather(assembled.mask_BT)
    figures = [
        TurnFigures(
            index=turn.index,
            old=old[place].cpu(),
            rollout=views[place].rollout.cpu(),
            teacher=views[place].teacher.cpu(),
            opd_valid=views[place].opd_valid.cpu(),
            num_rejected=float((1.0 - kept[place]).sum()),
            is_comparable=comparable(turn.sample),
            temperature=turn.sample.temperature,
            after_tool=turn.sample.after_tool,
        )
        for place, turn in zip(places, turns, strict=True)
    ]
    return figures, assembled


def _statistics(trainer: TrainerConfig, everything: Sequence[TurnFigures]) -> BatchStatistics:
    """Statistics of the gap over the turns of all ranks."""
    if not trainer.objective.needs_batch_statistics or not everything:
        return NO_STATISTICS
    views, before = [], []
    for one in sorted(everything, key=lambda figures: figures.index):
        nothing = torch.zeros_like(one.old)
        views.append(
            TurnView(
                rollout=one.rollout,
                teacher=one.teacher,
                opd_valid=one.opd_valid,
                reward_advantage=nothing,
                after_tool=nothing,
                version_gap=nothing,
                support=None,
            )
        )
        before.append(TurnScores(logprobs=one.old, logprobs_sampled=one.old))
    return batch_statistics(trainer.objective, views, before)


def _advantages(clean: TokenBatch, trainer: TrainerConfig) -> Tensor:
    """A [B, T] as the embedded trainer reports it, 0 at mask 0."""
    if isinstance(trainer.objective, HindsightOpd):
        return policy_advantages(clean, trainer.objective)
    gap_BT = distillation_advantage(clean.teacher_logprobs_BT, clean.old_logprobs_BT)
    return gap_BT * clean.opd_valid_BT


def _weights(clean: TokenBatch, step: Step) -> Tensor:
    """What each token weighs in the loss [B, T]."""
    return token_weights(
        clean.mask_BT,
        step.trainer.aggregation,
        turn_ids_BT=clean.turn_ids_BT,
        num_turns=step.counts.turns,
        num_tokens=step.counts.tokens,
        num_sequences=step.counts.sequences,
        horizon=step.trainer.aggregation_horizon,
    )


def _row_scale(
    args: Any,
    rollout_data: dict[str, Any],
    local: RowBatch,
    weights_BT: Tensor,
    states: Sequence[RowState],
    step: Step,
) -> Tensor:
    """What turns slime's weight of a token into ours [B, T]: a row counts as its turns.

    slime's policy loss is linear in positive factors of the advantage. Raises ValueError for what
    it cannot express.
    """
    for state in states:
        for turn in state.carrier.turns:
            if comparable(turn.sample) and turn.sample.temperature != 1.0:
                raise ValueError(
                    f"turn {turn.sample.turn_id} was sampled at temperature "
                    f"{turn.sample.temperature:g}, and slime's policy loss is at temperature 1: "
                    "use the loss type custom_loss"
                )
    sums_B1 = torch.stack(list(rollout_data["rollout_mask_sums"])).reshape(-1, 1)
    own_BT = 1.0 / (sums_B1.to(weights_BT).clamp(min=1.0) * step.scale)
    scale_BT = weights_BT / own_BT
    used_BT = local.batch.mask_BT > 0
    is_plain = bool(((scale_BT - 1.0).abs()[used_BT] < 1e-4).all())
    if (args.use_kl_loss or args.entropy_coef != 0) and not is_plain:
        raise ValueError(
            "slime's policy loss averages its KL and entropy terms over rows, which hold several "
            "turns here or lost tokens to rollout correction: use the loss type custom_loss"
        )
    return scale_BT


def _moments(clean: TokenBatch, advantages_BT: Tensor) -> dict[str, float]:
    """Sums over this rank's tokens that train, in float64."""
    used_BT = clean.mask_BT > 0
    values = advantages_BT[used_BT].double()
    gap_BT = distillation_advantage(clean.teacher_logprobs_BT, clean.old_logprobs_BT)
    gap_BT = gap_BT * clean.opd_valid_BT
    return {
        "adv": float(values.sum()),
        "adv_squared": float(values.square().sum()),
        "adv_positive": float((values > 0).sum()),
        "adv_abs_max": float(values.abs().max()) if values.numel() else 0.0,
        "gap_abs": float(gap_BT[used_BT].double().abs().sum()),
        "tokens_with_teacher": float((clean.opd_valid_BT * clean.mask_BT).sum()),
    }
