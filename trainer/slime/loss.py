"""The loss hook's work: the frame of the embedded trainer (objectives/frame.py) on slime's logits.

Every context rank brings its tokens' log-probs together, computes the loss of whole rows and gives
its own tokens' gradient. slime sums losses over micro-batches and ranks and divides by its number
of rollouts; our loss divides by global counts already, so that division is undone here.

Shapes: R tokens of a row's response, r those of them on this rank; B rows, T columns, K ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.batch.collate import TurnScores, comparable, split_turns
from trainer.batch.token_batch import Assembled, BatchContext, Correction, assemble
from trainer.batch.views import TeachingPlan, remember_supports
from trainer.config import TrainerConfig
from trainer.errors import DistillationOffError
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.frame import ObjectiveResult, expected_means, objective_loss
from trainer.slime.last_batch import Compared
from trainer.slime.logits import LogitsRequest, logits_logprobs
from trainer.slime.ranks import Ranks
from trainer.slime.rows import (
    RowBatch,
    RowState,
    Step,
    attached,
    carried,
    joined,
    parted,
    row_batch,
)
from trainer.step.update import loss_settings


def micro_batch_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, ranks: Ranks
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of one micro-batch of slime, `logits` [1, tokens, v] float32.

    Raises DistillationOffError where the distillation term of all micro-batches has no gradient.
    """
    states = attached(batch.get("rollout_log_probs"))
    step = states[0].step
    rows = row_batch(states, batch["loss_masks"], logits.device)
    now = _logprobs(args, batch, logits, rows, ranks)
    reference_BT = _reference(batch, rows, ranks)
    before = _before(rows, now, step)
    context = BatchContext(
        views=rows.views if before is None else remember_supports(rows.views, before),
        before=before,
        correction=Correction(step.trainer.correction.settings()),
        whole=None,
        statistics=step.statistics,
    )
    assembled = assemble(rows.batch, now, reference_BT, context)
    result = objective_loss(
        assembled.tokens, step.trainer.objective, loss_settings(step.trainer), step.counts
    )
    _probe(result, now, step, states)
    step.figures.note(result, step.epoch)
    if step.epoch == 0:
        step.figures.heated |= _heated(rows, now)
    scale = step.scale / ranks.context_size
    metrics = _metrics(result, assembled, rows, step)
    return (
        result.loss * scale,
        {name: value.detach() * scale for name, value in metrics.items()},
    )


def _heated(rows: RowBatch, now: TokenLogprobs) -> dict[int, Compared]:
    """Turns of another temperature than 1, at which slime does not score before the step."""
    turns = [
        (place, turn)
        for place, turn in carried(rows)
        if comparable(turn.sample) and turn.sample.temperature != 1.0
    ]
    if not turns:
        return {}
    policy = rows.batch.gather(now.logprobs_sampled_BT.detach())
    return {
        turn.index: Compared(policy[place].cpu(), rows.views[place].rollout.cpu())
        for place, turn in turns
    }


def _before(rows: RowBatch, now: TokenLogprobs, step: Step) -> list[TurnScores] | None:
    """The policy's scores of each view before the first step on the batch; None in that step, whose
    own are these. Raises ValueError where it did not see a row.
    """
    if rows.states[0].carrier.batch.epochs == 1:
        return None
    if step.epoch == 0:
        scores = split_turns(now, rows.batch)
        place = 0
        for state in rows.states:
            end = place + len(state.views)
            step.before[state.index] = tuple(scores[view] for view in range(place, end))
            place = end
        return None
    missing = [state.index for state in rows.states if state.index not in step.before]
    if missing:
        raise ValueError(
            f"step {step.epoch + 1} on a batch has the rows {missing}, which this rank did not "
            "see in the first one"
        )
    return [score for state in rows.states for score in step.before[state.index]]


@dataclass(frozen=True, slots=True)
class _OwnTokens:
    """This rank's policy tokens: `mine` [r] of each row, between whole rows and flat values."""

    rows: RowBatch
    ranks: Ranks
    mine: list[Tensor]

    @classmethod
    def of(cls, rows: RowBatch, ranks: Ranks) -> _OwnTokens:
        masks = parted(rows.rows(rows.batch.mask_BT), rows.states, ranks)
        return cls(rows, ranks, [mask > 0 for mask in masks])

    def flat(self, whole: list[Tensor]) -> Tensor:
        """[R, ...] of each row -> [N, ...]."""
        return self.chosen(parted(whole, self.rows.states, self.ranks))

    def chosen(self, parts: Sequence[Tensor]) -> Tensor:
        """[r, ...] of each row -> [N, ...]."""
        return torch.cat([part[mine] for part, mine in zip(parts, self.mine, strict=True)])

    def columns(self, values: Tensor) -> Tensor:
        """[N] or [N, K] -> [B, T] or [B, T, K] of all ranks."""
        numbers = [int(mine.sum()) for mine in self.mine]
        parts = [_scatter(*pair) for pair in zip(values.split(numbers), self.mine, strict=True)]
        return self.rows.columns(joined(parts, self.rows.states, self.ranks))


def _logprobs(
    args: Any, batch: dict[str, Any], logits: Tensor, rows: RowBatch, ranks: Ranks
) -> TokenLogprobs:
    """Log-probs of the policy tokens of all rows, from this rank's part of them."""
    trainer = rows.states[0].step.trainer
    own = _OwnTokens.of(rows, ranks)
    places = ranks.scoring_places(args, batch, logits.shape[1])
    found = logits_logprobs(
        logits[0],
        own.chosen([place.to(logits.device) for place in places]),
        _request(args, trainer, rows, own),
        ranks,
        chunk_tokens=trainer.logprob_chunk_tokens,
    )
    logprobs_BT = own.columns(found.logprobs_N)
    # Not by this rank's own tokens: context ranks must agree on what they exchange.
    same = bool((rows.batch.temperatures_BT == 1.0).all())
    top_ids = found.topk_ids_NK
    return TokenLogprobs(
        logprobs_BT=logprobs_BT,
        logprobs_sampled_BT=logprobs_BT if same else own.columns(found.sampled_N),
        entropy_BT=own.columns(found.entropy_N),
        support_BTK=None if found.support_NK is None else own.columns(found.support_NK),
        # Context ranks add floats; ids are exact in them.
        topk_ids_BTK=None if top_ids is None else own.columns(top_ids.double()).long(),
    )


def _request(args: Any, trainer: TrainerConfig, rows: RowBatch, own: _OwnTokens) -> LogitsRequest:
    """What the objective wants to know of this rank's policy tokens."""
    options = trainer.objective
    support_ids_NK: Tensor | None = None
    if options.support != "none":
        supports = [view.support for view in rows.views]
        ids = [support.ids for support in supports if support is not None]
        support_ids_NK = own.flat(rows.rows(rows.batch.spread(ids, fill=0)))
    plan = TeachingPlan(
        options=options,
        model=None,
        vocab_size=args.vocab_size,
        max_tokens=0,
        device=rows.batch.ids_BT.device,
    )
    return LogitsRequest(
        ids_N=own.flat(rows.rows(rows.batch.ids_BT)),
        temperatures_N=own.flat(rows.rows(rows.batch.temperatures_BT)),
        support_ids_NK=support_ids_NK,
        top_k=plan.support_size if options.compares_topk else 0,
        entropy_gradient=trainer.beta_entropy != 0,
    )


def _scatter(values: Tensor, wanted: Tensor) -> Tensor:
    """[N] or [N, K] at the wanted places, 0 elsewhere."""
    result = values.new_zeros((len(wanted), *values.shape[1:]))
    return result.index_put((wanted.nonzero().squeeze(-1),), values)


def _reference(batch: dict[str, Any], rows: RowBatch, ranks: Ranks) -> Tensor | None:
    if not rows.states[0].step.trainer.needs_start:
        return None
    reference = batch.get("ref_log_probs")
    if not reference:
        raise ValueError(
            "slime has no log-probs of the start, which beta_kl and reward_kl_coef need: set "
            "--use-kl-loss and --ref-load"
        )
    return rows.columns(joined(reference, rows.states, ranks))


def _metrics(
    result: ObjectiveResult, assembled: Assembled, rows: RowBatch, step: Step
) -> dict[str, Tensor]:
    """Values whose sum over micro-batches and ranks is that of the batch."""
    metrics = dict(result.reduced)
    gap = "train_rollout_logprob_abs_diff"
    share = step.comparable_share
    metrics[gap] = metrics[gap] / share if share > 0 else torch.full_like(metrics[gap], torch.nan)
    overlap = "opd/overlap_token_advantage"
    if overlap in metrics:
        # Over all tokens, 0 where nothing overlaps: divided by `opd/overlapping_frac` over the
        # whole batch, it is what the embedded trainer reports under the shorter name.
        metrics[f"{overlap}_of_all"] = metrics.pop(overlap)
    metrics["guard/nonfinite_tokens"] = result.token_sums["nonfinite"].float()
    metrics["guard/rejected_tokens"] = rows.batch.mask_BT.sum() - assembled.tokens.mask_BT.sum()
    expected = expected_means(step.trainer.objective) | {"loss", "opd/kl_loss", "entropy_loss"}
    if step.trainer.needs_start:
        expected |= {"kl_loss", "kl/clamped_frac"}
    missing = expected - metrics.keys()
    if missing:
        raise DistillationOffError(f"the loss did not report {sorted(missing)}")
    return metrics


def _probe(result: ObjectiveResult, now: TokenLogprobs, step: Step, states: list[RowState]) -> None:
    """Whether the distillation term has a gradient (ALGORITHMS 7.7), with respect to log-probs: no
    pass through the model is needed for it. slime offers no hook between the last micro-batch and
    the optimiser, so the last one of this rank decides.
    """
    inputs = [now.logprobs_BT, now.logprobs_sampled_BT, now.support_BTK]
    used = [one for one in inputs if one is not None and one.requires_grad]
    if not used or not result.distillation_loss.requires_grad:
        return
    gradients = torch.autograd.grad(
        result.distillation_loss, used, retain_graph=True, allow_unused=True
    )
    step.gradient_tokens += sum(int((one != 0).sum()) for one in gradients if one is not None)
    step.seen.update(state.index for state in states)
    if len(step.seen) < step.num_rows or step.gradient_tokens > 0 or step.advantage_sum == 0:
        return
    raise DistillationOffError(
        "the distillation term has no gradient, yet its advantages are not 0: no step can teach "
        "anything"
    )
