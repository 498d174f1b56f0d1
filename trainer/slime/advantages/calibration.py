"""Do the engines compute what slime's trainer computes? Both score the probes in a job's first
batch, at the same weights (ALGORITHMS 1.10).

slime computes in bfloat16, where two implementations differ by far more at some tokens than at
others, so the mean is what the bound is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import CalibrationError
from trainer.slime.ranks import Ranks
from trainer.slime.rows import RowState


def compare_probes(
    states: Sequence[RowState], logprobs: Sequence[Tensor], ranks: Ranks
) -> dict[str, float]:
    """Metrics of |engine - trainer| in nats over the probes of all ranks; none in a batch without
    probes. `logprobs` [R] are the trainer's, of each row's response.

    Raises CalibrationError, on every rank, for a mean above the bound or not finite.
    """
    bound = states[0].carrier.batch.calibration_bound
    if bound is None:
        return {}
    gaps = [
        (torch.from_numpy(state.carrier.probe).double() - own.double().cpu()).abs()
        for state, own in zip(states, logprobs, strict=True)
        if state.carrier.probe is not None
    ]
    gap = torch.cat([torch.zeros(0, dtype=torch.double), *gaps])
    parts = ranks.of_all((float(gap.sum()), float(gap.max()) if len(gap) else 0.0, len(gap)))
    number = sum(part[2] for part in parts)
    mean = sum(part[0] for part in parts) / max(number, 1)
    largest = max(part[1] for part in parts)
    if number == 0:
        raise CalibrationError("the probes of the calibration did not reach slime's trainer")
    if not mean <= bound:
        raise CalibrationError(
            f"the policy's engines differ from slime's trainer by {mean:.2e} nats on average over "
            f"{number} tokens (at most {largest:.2e}); cluster.calibration_bound is {bound:g}. "
            "Other weights, another precision, or another tokenizer?"
        )
    return {"calibration/mean": mean, "calibration/max": largest}
