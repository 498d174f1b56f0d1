"""The advantage hook's work: carriers -> views of turns -> corrections, denominators, advantages.

Everything that depends on the whole batch is settled here, before slime's first micro-batch: how
turns compare by reward, statistics of the gap, what correction removes (and so what the loss
divides by), the guards. Ranks exchange a few numbers per token once.

Where several steps are taken on a batch, slime has its rows once for each; all of them share what
is settled here.

At this point slime gives no log-probs at temperatures other than 1. A turn that was sampled at
another one is corrected in the loss hook; if a rule rejects it as a whole, it still counts in
denominators that count turns or rows.

Shapes: R tokens of a row's response, r those of them on this rank; B rows, T columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollout_bridge.slime.carrier import BatchFacts
from trainer.batch.collate import comparable
from trainer.batch.reward_view import view_rewards
from trainer.batch.token_batch import Correction
from trainer.config import TrainerConfig
from trainer.objectives.batch import TokenBatch, token_weights, weighted_sum
from trainer.objectives.distributions.kl import distillation_advantage
from trainer.objectives.options import HindsightOpd
from trainer.objectives.policy.policy_gradient import advantages as policy_advantages
from trainer.slime.advantages.agreement import agree, before_step
from trainer.slime.advantages.calibration import compare_probes
from trainer.slime.advantages.checks import RankFigures, check_taught, take_carriers
from trainer.slime.advantages.start_kls import start_kls
from trainer.slime.batch_metrics import AdvantageFigures, BatchReport, batch_metrics
from trainer.slime.last_batch import LastBatch
from trainer.slime.ranks import Ranks
from trainer.slime.row_states import compared, device_of, new_step, row_states
from trainer.slime.rows import RowBatch, Step, attach, joined, parted, row_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAdvantages:
    """What the hook puts into slime's rollout data: advantages [r] of each row, and metrics; what
    it warns of, and what the next batch reports.
    """

    advantages: list[Tensor]
    metrics: dict[str, float]
    warnings: tuple[str, ...]
    batch: LastBatch


@torch.no_grad()
def prepare(
    args: Any, rollout_data: dict[str, Any], trainer: TrainerConfig, ranks: Ranks
) -> RankAdvantages:
    """Advantages of this rank's rows; hangs a `RowState` on each row's `rollout_log_probs`.

    Takes the carriers out of `rollout_data["prompt"]`. Raises ValueError for data that do not fit
    together, NonFiniteError and DistillationOffError as the embedded trainer does.
    """
    carriers = take_carriers(rollout_data)
    every_log_probs = rollout_data["rollout_log_probs"]
    rollout_data = _of_one_step(rollout_data, len(carriers))
    step = new_step(rollout_data, carriers, trainer)
    objective = trainer.objective
    kls = start_kls(rollout_data, carriers, ranks) if objective.charges_kl else None
    batch = carriers[0].batch
    rewards = view_rewards(compared(batch, kls), objective, batch.step)
    states = row_states(args, rollout_data, carriers, step, rewards)
    local = row_batch(states, rollout_data["loss_masks"], device_of(rollout_data))
    logprobs = joined(rollout_data["log_probs"], states, ranks)
    calibration = compare_probes(states, logprobs, ranks)
    rows = before_step(local, logprobs, trainer)
    everything = agree(rows, carriers, step, ranks)
    clean = replace(rows.tokens, statistics=step.statistics)
    weights_BT = _weights(clean, step)
    advantages_BT = _advantages(clean, trainer)
    settled = _settle(local, clean, weights_BT, advantages_BT, step, ranks)
    report = _report(batch, everything, settled, step)
    check_taught(report.metrics)
    if args.loss_type == "policy_loss":
        advantages_BT = advantages_BT * _row_scale(args, rollout_data, local, weights_BT, step)
    steps = _steps(step, batch.epochs)
    places = [(one, state) for one in steps for state in states]
    for values, (one, state) in zip(every_log_probs, places, strict=True):
        attach(values, replace(state, step=one))
    advantages = parted(local.rows(advantages_BT), states, ranks)
    return RankAdvantages(
        advantages=[values.clone() for _ in steps for values in advantages],
        metrics=report.metrics | rewards.metrics | calibration,
        warnings=report.warnings,
        batch=LastBatch(
            turns=everything.turns,
            correction=Correction(trainer.correction.settings()),
            own=step.figures,
        ),
    )


def _of_one_step(rollout_data: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """slime's data of the rows of the first step on a batch."""
    by_row = ("loss_masks", "log_probs", "ref_log_probs", "response_lengths", "total_lengths")
    by_row += ("rollout_log_probs", "rollout_mask_sums")
    given = {key: rollout_data.get(key) for key in by_row}
    return rollout_data | {
        key: values[:num_rows] for key, values in given.items() if values is not None
    }


def _steps(settled: Step, epochs: int) -> list[Step]:
    """The steps on a batch; they share what the first one notes of the policy before it."""
    return [replace(settled, epoch=epoch, seen=set()) for epoch in range(epochs)]


def _settle(
    local: RowBatch,
    clean: TokenBatch,
    weights_BT: Tensor,
    advantages_BT: Tensor,
    step: Step,
    ranks: Ranks,
) -> AdvantageFigures:
    """The advantages of all ranks; sets, in `step`, the share that can be compared and the sum of
    this rank's advantages.
    """
    comparable_BT = local.batch.spread(
        [torch.isfinite(view.rollout).float() for view in local.views], fill=0.0
    )
    trained = advantages_BT[clean.mask_BT > 0].float().cpu().numpy()
    own = (
        weighted_sum(comparable_BT, weights_BT).item(),
        _moments(clean, advantages_BT),
        trained,
    )
    shares = ranks.of_all(own)
    step.comparable_share = sum(share for share, _, _ in shares)
    step.advantage_sum = float((advantages_BT.abs() * clean.mask_BT).sum())
    return AdvantageFigures(
        moments=[moments for _, moments, _ in shares],
        advantages=[advantages for _, _, advantages in shares],
    )


def _report(
    facts: BatchFacts, everything: RankFigures, settled: AdvantageFigures, step: Step
) -> BatchReport:
    return batch_metrics(
        everything.turns,
        facts,
        Correction(step.trainer.correction.settings()),
        settled=settled,
        tokens=step.counts.tokens,
        num_nonfinite=everything.nonfinite,
    )


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
    step: Step,
) -> Tensor:
    """Factors that turn slime's weight of a token into ours [B, T]: a row counts as its turns.

    slime's policy loss is linear in positive factors of the advantage. Raises ValueError for what
    it cannot express.
    """
    for state in local.states:
        for turn in state.carrier.turns:
            if comparable(turn.sample) and turn.sample.temperature != 1.0:
                raise ValueError(
                    f"turn {turn.sample.turn_id} was sampled at temperature "
                    f"{turn.sample.temperature:g}, but slime's policy loss is at temperature 1: "
                    "use the loss type custom_loss"
                )
    sums_B1 = torch.stack(list(rollout_data["rollout_mask_sums"])).reshape(-1, 1)
    own_BT = 1.0 / (sums_B1.to(weights_BT).clamp(min=1.0) * step.scale)
    scale_BT = weights_BT / own_BT
    used_BT = local.batch.mask_BT > 0
    is_plain = bool(((scale_BT - 1.0).abs()[used_BT] < 1e-4).all())
    has_kl = args.use_kl_loss and args.kl_loss_coef != 0
    if (has_kl or args.entropy_coef != 0) and not is_plain:
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
