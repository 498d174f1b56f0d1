"""What to watch when length is at stake: collapse to nothing, growth, and who grows.

Background: ALGORITHMS 8.8 and 2.8 (a mean over a sequence's own length favours short right answers
and long wrong ones). Lengths are in tokens. Shapes: N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUANTILES = (0.1, 0.5, 0.9, 0.99)


@torch.no_grad()
def length_metrics(lengths_N: Tensor, correct_N: Tensor | None = None) -> dict[str, float]:
    """Mean, extremes and quantiles, and the share of empty responses; NaN of no samples.

    With `correct_N` (above 0: correct) also the mean of either kind and their difference, wrong
    minus correct; a NaN is neither.
    """
    lengths = lengths_N.to(torch.float64)
    metrics = {
        "length/mean": _mean(lengths),
        "length/min": float(lengths.min()) if len(lengths) else float("nan"),
        "length/max": float(lengths.max()) if len(lengths) else float("nan"),
        "length/empty_frac": _mean((lengths == 0).double()),
    }
    for quantile in QUANTILES:
        value = float(torch.quantile(lengths, quantile)) if len(lengths) else float("nan")
        metrics[f"length/p{round(100 * quantile)}"] = value
    if correct_N is not None:
        correct = _mean(lengths[correct_N > 0])
        wrong = _mean(lengths[correct_N <= 0])
        metrics |= {
            "length/correct_mean": correct,
            "length/wrong_mean": wrong,
            "length/wrong_minus_correct": wrong - correct,
        }
    return metrics


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else float("nan")
