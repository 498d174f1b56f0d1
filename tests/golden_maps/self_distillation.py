"""SDPO's divergences and teachers: `sdpo_self_distillation`, `sdpo_teachers`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.golden_maps.check import EMPTY_MASK, Case, Comparison, Deliberate, GoldenMap, Meta
from tests.trainer.golden import decode
from trainer.objectives.distributions.gather import (
    full_logprobs,
    support_logprobs,
    token_logprobs_of,
    top_k_logprobs,
)
from trainer.objectives.distributions.self_distillation import (
    clipped_weights,
    sampled_token_divergence,
    self_distillation_divergence,
    self_distillation_loss,
)
from trainer.objectives.distributions.teachers import ema_update, trust_region_logits


def sdpo_self_distillation(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Reduced loss and the gradient of the student's logits."""
    inputs, config, outputs = case["inputs"], case["config"], case["outputs"]
    logits = inputs["student_logits"].detach().clone().requires_grad_()
    weights = None
    if config.get("is_clip") is not None:
        sampled = token_logprobs_of(logits.detach(), inputs["tokens"].long())
        weights = clipped_weights(sampled, inputs["old_log_probs"], is_clip=config["is_clip"])
    # The reference computes this mode as verl did then: without the number of sequences, which is
    # ours where there is one.
    num_sequences = 1 if config["loss_agg_mode"] == "seq-mean-token-sum-norm" else None
    loss = self_distillation_loss(
        _divergence(case, logits),
        inputs["response_mask"],
        mode=config["loss_agg_mode"],
        target_B=inputs.get("self_distillation_mask"),
        weights=weights,
        rollout_weights_BT=inputs.get("rollout_is_weights"),
        num_sequences=num_sequences,
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    for name, ours, reference in (
        ("loss", loss, outputs["loss"]),
        ("grad", gradient, outputs["grad_student_logits"]),
    ):
        deliberate = None
        if not _has_tokens(inputs):
            deliberate = Deliberate(reason=EMPTY_MASK, expected=torch.zeros_like(ours))
        yield Comparison(name=name, ours=ours, reference=reference, deliberate=deliberate)


def _has_tokens(inputs: Case) -> bool:
    """Whether a token counts."""
    mask = inputs["response_mask"] > 0
    target = inputs.get("self_distillation_mask")
    if target is not None:
        mask = mask & (target > 0).unsqueeze(-1)
    return bool(mask.any())


def _divergence(case: Case, logits: Tensor) -> Tensor:
    """Per token, of the kind that the case asks for."""
    inputs, config = case["inputs"], case["config"]
    teacher_logits, mask = inputs["teacher_logits"], inputs["response_mask"]
    if config["mode"] == "token":
        tokens = inputs["tokens"].long()
        return sampled_token_divergence(
            token_logprobs_of(logits, tokens), token_logprobs_of(teacher_logits, tokens), mask=mask
        )
    if config["mode"] == "full":
        student, teacher, rest = full_logprobs(logits), full_logprobs(teacher_logits), "none"
    else:
        ids = inputs.get("student_topk_ids")
        if ids is None:
            ids, _ = top_k_logprobs(logits.detach(), config["topk"])
        student, teacher = (
            support_logprobs(logits, ids.long()),
            support_logprobs(teacher_logits, ids.long()),
        )
        rest = "tail" if config["add_tail"] else "renormalise"
    return self_distillation_divergence(
        student, teacher, alpha=config["alpha"], rest=rest, valid=mask.unsqueeze(-1)
    )


def sdpo_teachers(case: Case, meta: Meta) -> Iterator[Comparison]:
    """A trust region's logits and log-probs, or the path of a moving average."""
    inputs, outputs = case["inputs"], case["outputs"]
    if "ref_logits" in inputs:
        logits = trust_region_logits(
            inputs["ref_logits"], inputs["student_logits"], inputs["mix_coef"]
        )
        ours = {"teacher_logits": logits, "teacher_log_probs": full_logprobs(logits)}
        for name, reference in outputs.items():
            yield Comparison(name=name, ours=ours[name], reference=reference)
        return
    teacher = inputs["theta0"].clone()
    trajectory = [teacher.clone()]
    for student in inputs["students"]:
        ema_update(teacher, decode(student), inputs["rate"])
        trajectory.append(teacher.clone())
    references = [decode(reference) for reference in outputs["teacher_trajectory"]]
    yield Comparison(name="teacher_trajectory", ours=trajectory, reference=references)


MAPS: dict[str, GoldenMap] = {
    "sdpo_self_distillation": sdpo_self_distillation,
    "sdpo_teachers": sdpo_teachers,
}
