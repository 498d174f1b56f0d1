"""Reverse KL with a tail bucket: `openclaw_topk_tail_reverse_kl`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.golden_maps.check import Case, Comparison, GoldenMap, Meta
from tests.trainer.live import loss_of, support_logprobs, support_of, token_batch
from trainer.objectives.distributions.kl import kl_terms, topk_tail_reverse_kl, with_tail
from trainer.objectives.frame import LossSettings
from trainer.objectives.options import TopkTailReverseKl


def openclaw_topk_tail_reverse_kl(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss, reports and gradient of the packed batch; per token in float64.

    The entropy whose coefficient a case names is the reference's own: that of the support and its
    tail, where a run has the whole vocabulary's.
    """
    inputs, outputs = case["inputs"], case["outputs"]
    coefficient = float(case["kwargs"].get("entropy_coef", 0.0))
    logits = inputs["logits"].detach().clone().requires_grad_()
    student_BTK = _by_sample(_student(case, logits), inputs)
    teacher_BTK = _by_sample(inputs["teacher_topk_log_probs"].to(logits.dtype), inputs)
    buckets_BTK = with_tail(student_BTK)
    entropy_BT = -kl_terms(buckets_BTK, torch.zeros_like(buckets_BTK)).sum(dim=-1)
    mask_BT = _by_sample(inputs["loss_masks"].to(logits.dtype), inputs)
    batch = token_batch(
        student_BTK[..., 0],
        mask_BT,
        entropy_BT=entropy_BT,
        support=support_of(
            _by_sample(inputs["teacher_topk_indices"].long(), inputs), student_BTK, teacher_BTK
        ),
    )
    options = TopkTailReverseKl(name="topk_tail_reverse_kl", topk=student_BTK.shape[-1])
    settings = LossSettings(beta_kl=0.0, beta_entropy=coefficient)
    # The reference's sum over samples of means over tokens.
    result = loss_of(batch, options, settings, turns=1)
    reduced = {
        "loss": result.loss,
        "kl_loss": result.reduced["opd/kl_loss"],
        "entropy_loss": result.reduced["entropy_loss"],
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
        oracle = topk_tail_reverse_kl(
            _student(case, inputs["logits"].double()), inputs["teacher_topk_log_probs"].double()
        )
        yield Comparison(
            name="oracle64_per_token_kl", ours=oracle.kl, reference=outputs["oracle64_per_token_kl"]
        )


def _student(case: Case, logits: Tensor) -> Tensor:
    """[N, K] of response tokens, responses one after the other as in the teacher's tensors."""
    rows = []
    end = 0
    for total, response in _lengths(case["inputs"]):
        end += total
        # The row at i scores token i + 1.
        rows.append(logits[end - response - 1 : end - 1])
    return support_logprobs(torch.cat(rows), case["inputs"]["teacher_topk_indices"])


def _by_sample(flat: Tensor, inputs: Case) -> Tensor:
    """[N, ...] -> [B, T, ...], padded with zeros."""
    lengths = [response for _, response in _lengths(inputs)]
    return pad_sequence(list(flat.split(lengths)), batch_first=True)


def _lengths(inputs: Case) -> list[tuple[int, int]]:
    return [
        (int(total), int(response))
        for total, response in zip(inputs["total_lengths"], inputs["response_lengths"], strict=True)
    ]


MAPS: dict[str, GoldenMap] = {"openclaw_topk_tail_reverse_kl": openclaw_topk_tail_reverse_kl}
