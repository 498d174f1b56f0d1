"""Forward KL on the teacher's top-k: `verl091_forward_kl_topk`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.golden_maps.check import FLOAT32_INSIDE_TOLERANCE, Case, Comparison, GoldenMap, Meta
from tests.trainer.live import support_logprobs, top_ids
from trainer.objectives.distributions.kl import forward_kl_topk
from trainer.objectives.linear.logprobs import CHUNK_TOKENS

FEW_TOKENS = 2
"""Chunks of the cases that ask for chunks."""


def verl_forward_kl_topk(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Everything per token, before the last clamp, and the gradient of the sum."""
    inputs, options, outputs = case["inputs"], case["kwargs"], case["outputs"]
    logits = inputs["student_logits"].detach().clone().requires_grad_()
    teacher_ids = inputs["teacher_topk_ids"].long()
    chunk_tokens = FEW_TOKENS if options.get("use_chunked_topk") else CHUNK_TOKENS
    student_ids = top_ids(logits, options["topk"], chunk_tokens=chunk_tokens)
    terms = forward_kl_topk(
        support_logprobs(logits, teacher_ids, chunk_tokens=chunk_tokens),
        inputs["teacher_topk_log_probs"],
        student_ids,
        teacher_ids,
        options.get("log_prob_min_clamp"),
        clamp_negative=False,
    )
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logits)
    ours = {
        "distillation_losses": terms.loss,
        "student_mass": terms.student_mass,
        "teacher_mass": terms.teacher_mass,
        "overlap_count": terms.overlap_count,
        "overlap_token_advantage": terms.overlap_token_advantage,
        "grad_student_logits_of_sum": gradient,
    }
    for name, reference in outputs.items():
        # The masses are the reference's only results in the input's own type, unless it gathers
        # the student's in chunks.
        is_own_type = name == "teacher_mass" or (
            name == "student_mass" and not options.get("use_chunked_topk")
        )
        tolerance = None if is_own_type else FLOAT32_INSIDE_TOLERANCE
        yield Comparison(name=name, ours=ours[name], reference=reference, tolerance=tolerance)


MAPS: dict[str, GoldenMap] = {"verl091_forward_kl_topk": verl_forward_kl_topk}
