"""REINFORCE under rollout correction: `seed_pure_is_loss_418f`.

The reference's own gradient is of weights that were not detached, and no target; the file holds the
right one beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.golden_maps.check import EMPTY_MASK, Case, Comparison, Deliberate, Meta
from trainer.objectives.batch import selected, token_weights, weighted_sum
from trainer.objectives.distributions.kl import kl_estimate
from trainer.objectives.policy.ppo import pure_is
from trainer.objectives.rollout_correction.config import settings_from_verl
from trainer.objectives.rollout_correction.correct import CorrectionResult, correct_rollout

VETO = "ALGORITHMS 4.5: pure IS applies the mask of a veto too"
VETO_OPTION = "rollout_token_veto_threshold"
PURE = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}


def pure_is_loss(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss, KL, weights and gradient."""
    kwargs, outputs = case["kwargs"], case["outputs"]
    # The reference leaves a veto out where nothing else rejects.
    is_lone_veto = kwargs.get(VETO_OPTION) is not None and kwargs.get("rollout_rs") is None
    read = {**kwargs, VETO_OPTION: None} if is_lone_veto else kwargs
    corrected = _correct(case, read)
    ours = _evaluate(case, corrected)
    ours |= {"is_weights": corrected.weights_BT}
    for name in ("loss", "kl_divergence", "is_weights", "grad_log_prob_detached_weights"):
        reference, deliberate = outputs[name], None
        if not corrected.mask_BT.any() and name != "is_weights":
            deliberate = Deliberate(
                reason=EMPTY_MASK, expected=torch.zeros_like(torch.as_tensor(ours[name]))
            )
        yield Comparison(name=name, ours=ours[name], reference=reference, deliberate=deliberate)
    if is_lone_veto:
        vetoed = _correct(case, kwargs)
        rows = vetoed.mask_BT.any(dim=-1)
        rest = {name: tensor[rows] for name, tensor in case["inputs"].items()}
        expected = _evaluate({**case, "inputs": rest}, _correct({**case, "inputs": rest}, read))
        yield Comparison(
            name="loss under veto",
            ours=_evaluate(case, vetoed)["loss"],
            reference=outputs["loss"],
            deliberate=Deliberate(reason=VETO, expected=expected["loss"]),
        )


def _correct(case: Case, kwargs: dict[str, Any]) -> CorrectionResult:
    inputs = case["inputs"]
    return correct_rollout(
        inputs["log_prob"],
        inputs["rollout_log_prob"],
        inputs["response_mask"].to(inputs["log_prob"].dtype),
        settings_from_verl({**kwargs, **PURE}),
    )


def _evaluate(case: Case, corrected: CorrectionResult) -> dict[str, Any]:
    inputs, mask = case["inputs"], corrected.mask_BT
    leaf = inputs["log_prob"].clone().requires_grad_()
    logprobs, rollout, advantages = (
        selected(values, mask)
        for values in (leaf, inputs["rollout_log_prob"], inputs["advantages"])
    )
    mode = case["loss_agg_mode"]
    # At this commit that mode does not divide by the sequences, as ours does where there is one.
    num_sequences = 1 if mode == "seq-mean-token-sum-norm" else None
    loss = weighted_sum(
        pure_is(logprobs, advantages, corrected.weights_BT),
        token_weights(mask, mode, num_sequences=num_sequences),
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    return {
        "loss": loss.detach(),
        "kl_divergence": weighted_sum(
            kl_estimate("k1", rollout, logprobs.detach()), token_weights(mask, "token-mean")
        ),
        "grad_log_prob_detached_weights": grad,
    }
