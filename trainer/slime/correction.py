"""The TIS hook's work: rollout correction inside slime's own policy loss.

Shapes: R tokens of a row's response, r those of them on this rank; B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.batch.token_batch import BatchContext, Correction, assemble
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.batch import NO_STATISTICS
from trainer.objectives.distributions.kl import comparable_ratio
from trainer.objectives.frame import WEIGHT_TOLERANCE
from trainer.slime.ranks import Ranks
from trainer.slime.rows import attached, joined, parted, row_batch


@torch.no_grad()
def correction_weights(
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    ranks: Ranks,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Weights [sum of r] of slime's tokens, loss masks [R] of each row without what is rejected,
    and metrics [sum of r] per token. Log-probs are [r] of each row, at temperature 1.
    """
    states = attached(rollout_log_probs)
    step = states[0].step
    rows = row_batch(states, loss_masks, train_log_probs[0].device)
    old_BT = rows.columns(joined([values.detach() for values in train_log_probs], states, ranks))
    now = TokenLogprobs(
        logprobs_BT=old_BT, logprobs_sampled_BT=old_BT, entropy_BT=torch.zeros_like(old_BT)
    )
    context = BatchContext(
        views=rows.views,
        before=None,
        correction=Correction(step.trainer.correction.settings()),
        whole=None,
        statistics=NO_STATISTICS,
    )
    tokens = assemble(rows.batch, now, None, context).tokens
    ratio_BT = comparable_ratio(old_BT, tokens.rollout_logprobs_BT)
    acted_BT = (tokens.weights_BT - ratio_BT).abs() > WEIGHT_TOLERANCE

    def flat(columns_BT: Tensor) -> Tensor:
        used_BT = torch.where(rows.batch.mask_BT > 0, columns_BT, torch.zeros_like(columns_BT))
        return torch.cat(parted(rows.rows(used_BT), states, ranks))

    masks = [
        mask * (kept > 0).to(mask.dtype)
        for mask, kept in zip(loss_masks, rows.rows(tokens.mask_BT), strict=True)
    ]
    metrics = {
        "tis": flat(tokens.weights_BT),
        "tis_abs": flat((ratio_BT - 1.0).abs()),
        "tis_clipfrac": flat(acted_BT.to(old_BT.dtype)),
        "tis_rejected_frac": flat(1.0 - tokens.mask_BT),
    }
    return flat(tokens.weights_BT), masks, metrics
