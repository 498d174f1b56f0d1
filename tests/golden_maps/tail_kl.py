"""Reverse KL with a tail bucket: `openclaw_topk_tail_reverse_kl`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.golden_maps.check import Case, Comparison, GoldenMap, Meta
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.distributions.gather import support_logprobs
from trainer.objectives.distributions.tail_kl import TailKlTerms, topk_tail_reverse_kl


def openclaw_topk_tail_reverse_kl(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss, reports and gradient of the packed batch; per token in float64."""
    inputs, outputs = case["inputs"], case["outputs"]
    coefficient = float(case["kwargs"].get("entropy_coef", 0.0))
    logits = inputs["logits"].detach().clone().requires_grad_()
    valid = inputs["loss_masks"].unsqueeze(-1)
    terms = _terms(case, logits, beta_entropy=coefficient, valid=valid)
    reduced = {
        "loss": _reduce(terms.loss, inputs),
        "kl_loss": _reduce(terms.kl, inputs),
        "entropy_loss": _reduce(terms.entropy, inputs),
    }
    (gradient,) = torch.autograd.grad(reduced["loss"], logits)
    if coefficient == 0.0:
        # Without a coefficient the reference leaves its entropy out and reports 0.
        reduced["entropy_loss"] = torch.zeros_like(reduced["loss"])
    yield Comparison(name="loss", ours=reduced["loss"], reference=outputs["loss"])
    yield Comparison(
        name="reported",
        ours={name: value for name, value in reduced.items() if name in outputs["reported"]},
        reference=outputs["reported"],
    )
    yield Comparison(name="grad_logits", ours=gradient, reference=outputs["grad_logits"])
    if "oracle64_per_token_kl" in outputs:
        oracle = _terms(case, inputs["logits"].double(), beta_entropy=0.0)
        yield Comparison(
            name="oracle64_per_token_kl", ours=oracle.kl, reference=outputs["oracle64_per_token_kl"]
        )


def _terms(
    case: Case, logits: Tensor, *, beta_entropy: float, valid: Tensor | None = None
) -> TailKlTerms:
    """Per response token, responses one after the other as in the teacher's tensors."""
    inputs = case["inputs"]
    rows = []
    end = 0
    for total, response in _lengths(inputs):
        end += total
        # The row at i scores token i + 1.
        rows.append(logits[end - response - 1 : end - 1])
    return topk_tail_reverse_kl(
        support_logprobs(torch.cat(rows), inputs["teacher_topk_indices"].long()),
        inputs["teacher_topk_log_probs"].to(logits.dtype),
        valid=valid,
        beta_entropy=beta_entropy,
    )


def _reduce(values_N: Tensor, inputs: Case) -> Tensor:
    """The reference's sum over samples of means over tokens."""
    lengths = [response for _, response in _lengths(inputs)]

    def rows(flat: Tensor) -> Tensor:
        return pad_sequence(list(flat.split(lengths)), batch_first=True)

    mask_BT = rows(inputs["loss_masks"].to(values_N.dtype))
    turn_ids_BT = torch.arange(len(lengths)).unsqueeze(-1).expand(mask_BT.shape)
    weights_BT = token_weights(
        mask_BT, "turn-mean-token-mean", turn_ids_BT=turn_ids_BT, num_turns=1
    )
    return weighted_sum(rows(values_N), weights_BT)


def _lengths(inputs: Case) -> list[tuple[int, int]]:
    return [
        (int(total), int(response))
        for total, response in zip(inputs["total_lengths"], inputs["response_lengths"], strict=True)
    ]


MAPS: dict[str, GoldenMap] = {"openclaw_topk_tail_reverse_kl": openclaw_topk_tail_reverse_kl}
