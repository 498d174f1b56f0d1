"""Log-probs from logits, computed the same way for sampled and scored tokens.

`torch.log_softmax` adds up a large vocabulary one by one, and is off by 1e-5 and more at 262k ids.
"""

from __future__ import annotations

import torch


def normalise(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits [..., V] minus their row's largest, in place, and their logsumexp [...].

    Their difference is the log-probs. Without the shift, a token near probability 1 would be off by
    the rounding of its logit.
    """
    logits_TV.sub_(logits_TV.amax(dim=-1, keepdim=True))
    return logits_TV, torch.logsumexp(logits_TV, dim=-1)
