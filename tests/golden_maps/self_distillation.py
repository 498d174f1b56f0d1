"""SDPO's divergences and teachers: `sdpo_self_distillation`, `sdpo_teachers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.golden_maps.check import EMPTY_MASK, Case, Comparison, Deliberate, GoldenMap, Meta
from tests.trainer.golden import decode
from tests.trainer.live import (
    loss_of,
    sampled_logprobs,
    support_logprobs,
    support_of,
    token_batch,
    top_ids,
)
from trainer.model.policy import Policy
from trainer.model.teacher_models import EmaTeacher, StateModel, TrustRegionTeacher
from trainer.model.token_states import Head, TokenRequest
from trainer.objectives.batch import Support, TokenBatch
from trainer.objectives.distributions.self_distillation import clipped_weights
from trainer.objectives.frame import LossSettings
from trainer.objectives.options import HindsightOpd, ObjectiveOptions, SelfDistillation


def sdpo_self_distillation(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Reduced loss and the gradient of the student's logits."""
    inputs, config, outputs = case["inputs"], case["config"], case["outputs"]
    logits = inputs["student_logits"].detach().clone().requires_grad_()
    batch, options = _sampled(case, logits) if config["mode"] == "token" else _all(case, logits)
    # The reference computes this mode as verl did then: without the number of sequences, which is
    # ours where there is one.
    is_norm = config["loss_agg_mode"] == "seq-mean-token-sum-norm"
    settings = LossSettings(aggregation=config["loss_agg_mode"], beta_kl=0.0)
    loss = loss_of(batch, options, settings, sequences=1 if is_norm else None).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    for name, ours, reference in (
        ("loss", loss, outputs["loss"]),
        ("grad", gradient, outputs["grad_student_logits"]),
    ):
        deliberate = None
        if not batch.mask_BT.any():
            deliberate = Deliberate(reason=EMPTY_MASK, expected=torch.zeros_like(ours))
        yield Comparison(name=name, ours=ours, reference=reference, deliberate=deliberate)


def _batch(
    case: Case, logprobs: Tensor, support: Support | None = None, weights: Tensor | None = None
) -> TokenBatch:
    """A row without a target is none of the reference's batch."""
    inputs = case["inputs"]
    mask, target = inputs["response_mask"], inputs.get("self_distillation_mask")
    if target is not None:
        mask = mask * target.to(mask.dtype).unsqueeze(-1)
    correction = inputs.get("rollout_is_weights")
    if correction is not None and weights is not None:
        weights = weights * correction
    return token_batch(
        logprobs,
        mask,
        old_BT=inputs["old_log_probs"],
        teacher_BT=sampled_logprobs(inputs["teacher_logits"], inputs["tokens"]),
        weights_BT=correction if weights is None else weights,
        support=support,
    )


def _sampled(case: Case, logits: Tensor) -> tuple[TokenBatch, ObjectiveOptions]:
    """Reverse KL by the sampled token: REINFORCE with the gap to the current student."""
    assert case["config"]["alpha"] == 1.0
    inputs, cap = case["inputs"], case["config"].get("is_clip")
    logprobs = sampled_logprobs(logits, inputs["tokens"])
    weights = None
    if cap is not None:
        weights = clipped_weights(logprobs.detach(), inputs["old_log_probs"], is_clip=cap).weights
    options = HindsightOpd(surrogate="pure_is", advantage_reference="current")
    return _batch(case, logprobs, weights=weights), options


def _all(case: Case, logits: Tensor) -> tuple[TokenBatch, ObjectiveOptions]:
    """A divergence on a support; the whole vocabulary is one that leaves nothing out."""
    inputs, config = case["inputs"], case["config"]
    is_full = config["mode"] == "full"
    ids = inputs.get("student_topk_ids")
    if is_full:
        ids = torch.arange(logits.shape[-1]).expand(logits.shape)
    elif ids is None:
        ids = top_ids(logits, config["topk"])
    student, teacher = (
        support_logprobs(values, ids) for values in (logits, inputs["teacher_logits"])
    )
    options = SelfDistillation(
        name="self_distillation",
        alpha=config["alpha"],
        topk=ids.shape[-1],
        tail=config["add_tail"] and not is_full,
        is_clip=config.get("is_clip"),
    )
    support = support_of(ids, student, teacher)
    return _batch(case, sampled_logprobs(logits, inputs["tokens"]), support), options


def sdpo_teachers(case: Case, meta: Meta) -> Iterator[Comparison]:
    """A trust region's logits and log-probs, or the path of a moving average."""
    inputs, outputs = case["inputs"], case["outputs"]
    if "ref_logits" in inputs:
        yield from _trust_region(inputs, outputs)
        return
    policy = _OneParameter(nn.Parameter(inputs["theta0"].clone()))
    teacher = EmaTeacher(cast(Policy, policy), inputs["rate"])
    trajectory = [teacher.state()[0].clone()]
    for student in inputs["students"]:
        policy.parameter.data = decode(student)
        teacher.follow()
        trajectory.append(teacher.state()[0].clone())
    references = [decode(reference) for reference in outputs["teacher_trajectory"]]
    yield Comparison(name="teacher_trajectory", ours=trajectory, reference=references)


def _trust_region(inputs: Case, outputs: Case) -> Iterator[Comparison]:
    """Logits that differ by a number per position are one teacher: they are compared as log-probs,
    which are all that is made of them.
    """
    shape, size = inputs["ref_logits"].shape[:-1], inputs["ref_logits"].shape[-1]
    head = Head(weight_VH=torch.eye(size, dtype=inputs["ref_logits"].dtype), bias_V=None)
    models = [_Logits(head, inputs[name]) for name in ("ref_logits", "student_logits")]
    teacher = TrustRegionTeacher(*cast(list[StateModel], models), inputs["mix_coef"])
    everything = torch.arange(size).expand(*shape, size)
    found = teacher.token_logprobs(
        torch.zeros(shape, dtype=torch.long),
        torch.ones(shape),
        request=TokenRequest(support_ids_BTK=everything),
    ).support_BTK
    references: dict[str, Any] = dict(outputs)
    references["teacher_logits"] = torch.log_softmax(outputs["teacher_logits"], dim=-1)
    for name, reference in references.items():
        yield Comparison(name=name, ours=found, reference=reference)


@dataclass
class _OneParameter:
    """A policy of one tensor."""

    parameter: nn.Parameter

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.parameter]


@dataclass
class _Logits:
    """A model whose hidden states are its logits."""

    head: Head
    logits: Tensor
    chunk_tokens: int = 4

    def hidden_states(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return self.logits[mask_BT > 0]


MAPS: dict[str, GoldenMap] = {
    "sdpo_self_distillation": sdpo_self_distillation,
    "sdpo_teachers": sdpo_teachers,
}
