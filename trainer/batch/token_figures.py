"""What a step computed at each token, for people who ask why it moved as it did, and how a batch's
advantages are spread.

It changes no loss. Shapes: B rows, T tokens; R response tokens of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from records.training.step_results import TokenFigures
from records.types import Logprobs
from trainer.batch.collate import MicroBatch
from trainer.objectives.batch import TokenBatch
from trainer.objectives.frame import ObjectiveResult

MOST_LOG_RATIO = 20.0
"""As everywhere before a ratio is taken."""
_QUANTILES = {f"opd/adv_q{share:02d}": share / 100 for share in (5, 25, 50, 75, 95)}
QUANTILE_KEYS = frozenset(_QUANTILES)
"""Metrics that `advantage_quantiles` gives."""


@torch.no_grad()
def token_figures(
    result: ObjectiveResult, tokens: TokenBatch, compared_BT: Tensor, batch: MicroBatch
) -> dict[int, TokenFigures]:
    """The figures of each turn of a micro-batch; `tokens` is what the objective got, with what is
    not finite, and `compared_BT` the log-probs that rollout correction compared with the engine's.
    """
    log_ratios_BT = tokens.logprobs_sampled_BT - tokens.old_logprobs_sampled_BT
    columns_BT = (
        log_ratios_BT.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO),
        torch.where(result.mask_BT > 0, result.weights_BT, torch.nan),
        tokens.entropy_BT,
        (compared_BT - tokens.rollout_logprobs_BT).abs(),
    )
    values_BTK = torch.stack([one.detach().float() for one in columns_BT], dim=-1).cpu()
    values_BTK[~torch.isfinite(values_BTK)] = torch.nan
    return {turn: _figures(values) for turn, values in batch.gather(values_BTK).items()}


def _figures(values: Tensor) -> TokenFigures:
    """From [R, 4]."""
    log_ratios, weights, entropies, engine_gaps = values.numpy().T.copy()
    return TokenFigures(
        log_ratios=log_ratios, weights=weights, entropies=entropies, engine_gaps=engine_gaps
    )


def advantage_quantiles(advantages: Sequence[Logprobs]) -> dict[str, float]:
    """Quantiles of the advantages of a batch's turns [R] over the tokens that trained, in nats; NaN
    without any.
    """
    values = np.concatenate(advantages) if advantages else np.empty(0, dtype=np.float32)
    known = values[np.isfinite(values)].astype(np.float64)
    if not len(known):
        return dict.fromkeys(_QUANTILES, math.nan)
    found = np.quantile(known, list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, found.tolist(), strict=True))
