"""How far the passes over one batch would move a policy that has not been trained yet.

AdamW moves each weight by about the learning rate, whatever the gradient. What that does to the
model's probabilities depends on the model: one rate moves one model ten times as far as another of
its size. It knows no store and no engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from records.types import Ids
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.model.token_states import TokenRequest
from trainer.step.update import new_optimizer

USUAL = (0.03, 0.6)
"""Nats per token: how far models moved that the recipe was measured on (docs/lora.md)."""
TOO_FAR = 1.5
"""Nats per token."""
_AIM = 0.4
"""Nats per token that a suggested rate should lead to."""
_MOST_TRIES = 12
_DRAWN = 32
"""Tokens drawn at each position to estimate the KL."""


def first_batch_kl(policy: Policy, texts: Sequence[Ids], config: TrainerConfig) -> float:
    """KL(before || after) in nats, per token of `texts` (each at least 2 ids): how far
    `epochs_per_batch` AdamW steps at the peak rate towards these texts move the policy at them.

    Afterwards the weights are exactly what they were. The KL is the mean of log p - log q over
    tokens that the policy drew before, so it needs no second model and no whole distributions.
    """
    parameters = policy.trainable_parameters()
    kept = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    optimizer = new_optimizer(parameters, config)
    generator = torch.Generator(device=policy.device).manual_seed(0)
    rows = [_row(ids, policy.device) for ids in texts]
    num_tokens = sum(int(mask_BT.sum()) for _, mask_BT in rows)
    try:
        with torch.no_grad():
            draw = TokenRequest(draw=_DRAWN, generator=generator)
            before = [policy.token_logprobs(*row, request=draw) for row in rows]
        for _ in range(config.epochs_per_batch):
            optimizer.zero_grad(set_to_none=True)
            for row in rows:
                (-policy.token_logprobs(*row).logprobs_BT.sum() / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
            optimizer.step()
        with torch.no_grad():
            moved = 0.0
            for row, old in zip(rows, before, strict=True):
                request = TokenRequest(support_ids_BTK=old.drawn_ids_BTK)
                new_BTK = policy.token_logprobs(*row, request=request).support_BTK
                assert new_BTK is not None
                assert old.drawn_BTK is not None
                moved += float((old.drawn_BTK - new_BTK).mean(dim=-1).sum())
    finally:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
    return moved / num_tokens


def rate_warning(policy: Policy, texts: Sequence[Ids], config: TrainerConfig) -> str | None:
    """What to do if the passes over one batch move `policy` too far at `texts`: a lower rate, which
    was tried. None: nothing.
    """
    kl = first_batch_kl(policy, texts, config)
    if kl <= TOO_FAR:
        return None
    rate, then = config.learning_rate, kl
    for _ in range(_MOST_TRIES):
        # The KL grows with the rate's square, until the policy is far from what it was.
        factor = math.sqrt(_AIM / then) if math.isfinite(then) else 0.0
        rate = float(f"{rate * min(max(factor, 0.1), 0.5):.1g}")
        slower = config.model_copy(update={"learning_rate": rate})
        then = first_batch_kl(policy, texts, slower)
        if then <= USUAL[1]:
            break
    return (
        f"{config.epochs_per_batch} passes over one batch at trainer.learning_rate = "
        f"{config.learning_rate:g} would move this model by {kl:.2g} nats per token, where "
        f"{USUAL[0]:g} to {USUAL[1]:g} are usual: it would forget what it can do. At {rate:g} it "
        f"would move by {then:.2g}: start a new run with --set trainer.learning_rate={rate:g}"
    )


def _row(ids: Ids, device: torch.device) -> tuple[Tensor, Tensor]:
    """One text as ids [1, T] and a mask [1, T] of all but its first token."""
    ids_BT = torch.from_numpy(np.asarray(ids, dtype=np.int64)).unsqueeze(0).to(device)
    mask_BT = torch.ones(ids_BT.shape, device=device)
    mask_BT[:, 0] = 0.0
    return ids_BT, mask_BT
