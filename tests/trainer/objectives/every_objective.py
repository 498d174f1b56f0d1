"""Every objective in every form, and random micro-batches for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trainer.objectives.batch import BatchStatistics, Support, TokenBatch
from trainer.objectives.options import (
    ForwardKlTopk,
    HindsightOpd,
    ObjectiveOptions,
    OverlapTopk,
    SelfDistillation,
    SideSampleOptions,
    SparseKl,
    SupervisedOpd,
    TopkTailReverseKl,
)

B, T, K = 4, 7, 3

OBJECTIVES: dict[str, ObjectiveOptions] = {
    "ppo": HindsightOpd(),
    "ppo_dual_clip": HindsightOpd(dual_clip=1.5),
    "ppo_current": HindsightOpd(advantage_reference="current"),
    "ppo_with_rewards": HindsightOpd(reward_coef=0.5),
    "ppo_normalised": HindsightOpd(normalise=True),
    "ppo_opsm": HindsightOpd(opsm_delta=1e-4),
    "ppo_opsm_turn": HindsightOpd(opsm_delta=1e-4, opsm_scope="turn"),
    "rewards_alone": HindsightOpd(opd_coef=0.0, reward_coef=1.0),
    "unclipped": HindsightOpd(surrogate="unclipped"),
    "cispo": HindsightOpd(surrogate="cispo", clip_low=1.0, clip_high=0.3),
    "gspo": HindsightOpd(surrogate="gspo"),
    "gspo_sequence": HindsightOpd(surrogate="gspo_sequence"),
    "pure_is": HindsightOpd(surrogate="pure_is"),
    "decoupled": HindsightOpd(surrogate="decoupled"),
    "a3po": HindsightOpd(surrogate="a3po"),
    "m2po": HindsightOpd(surrogate="m2po"),
    "supervised_k2": SupervisedOpd(name="supervised_opd"),
    "supervised_k3": SupervisedOpd(name="supervised_opd", estimator="k3"),
    "supervised_abs": SupervisedOpd(name="supervised_opd", estimator="abs"),
    "supervised_k1+": SupervisedOpd(name="supervised_opd", estimator="k1+"),
    "supervised_clamped": SupervisedOpd(name="supervised_opd", loss_max_clamp=0.05),
    "forward_kl_topk": ForwardKlTopk(name="forward_kl_topk", topk=K),
    "forward_kl_clamped": ForwardKlTopk(name="forward_kl_topk", topk=K, log_prob_min_clamp=-2.0),
    "topk_tail": TopkTailReverseKl(name="topk_tail_reverse_kl", topk=K),
    "jsd_tail": SelfDistillation(name="self_distillation", topk=K, is_clip=None),
    "jsd_weighted": SelfDistillation(name="self_distillation", topk=K, is_clip=1.1),
    "forward_renormalised": SelfDistillation(
        name="self_distillation", topk=K, alpha=0.0, tail=False, is_clip=None
    ),
    "reverse_tail": SelfDistillation(name="self_distillation", topk=K, alpha=1.0, is_clip=None),
    "overlap_topk": OverlapTopk(name="overlap_topk", topk=K),
    "overlap_with_rewards": OverlapTopk(name="overlap_topk", topk=K, reward_coef=0.5),
    "side_samples": SideSampleOptions(name="side_samples", samples=K),
    "side_samples_old": SideSampleOptions(
        name="side_samples", samples=K, advantage_reference="old"
    ),
    "side_samples_clipped": SideSampleOptions(
        name="side_samples", samples=K, advantage_reference="old", clip=0.2
    ),
    "side_samples_no_is": SideSampleOptions(name="side_samples", samples=K, importance=False),
    "sparse_reverse": SparseKl(name="sparse_kl", topk=K),
    "sparse_forward": SparseKl(name="sparse_kl", topk=K, direction="forward"),
    "sparse_skewed": SparseKl(name="sparse_kl", topk=K, direction="skewed", token_clip=0.3),
    "sparse_tail": SparseKl(
        name="sparse_kl", topk=K, direction="skewed", alpha=0.3, support_of="teacher", tail=True
    ),
    "sparse_pg": SparseKl(name="sparse_kl", topk=K, direction="policy_gradient"),
}
# The gradient of these is not the derivative of their value: a part of it is detached on purpose.
DETACHED_PARTS = frozenset(
    {
        "ppo_current",
        "cispo",
        "gspo",
        "a3po",
        "supervised_k1+",
        "jsd_weighted",
        "side_samples",
        "side_samples_no_is",
    }
)
REWARDED = frozenset({"ppo_with_rewards", "rewards_alone", "overlap_with_rewards"})


def random_batch(seed: int = 0, *, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """Four rows: two turns with context between, one turn, one cut by padding, one empty.

    Policies lie some tenths of a nat apart, so that clips act on some tokens and not on others.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, size: float) -> Tensor:
        return size * torch.randn(*shape, generator=generator, dtype=dtype)

    turn_ids = torch.tensor(
        [[-1, 0, 0, 0, -1, 1, 1], [-1, -1, 2, 2, 2, 2, 2], [-1, 3, 3, -1, -1, -1, -1], [-1] * T]
    )
    mask = (turn_ids >= 0).to(dtype)
    logprobs = -0.3 - noise(B, T, size=1.0).abs()
    old = logprobs + noise(B, T, size=0.25)
    support = torch.log_softmax(noise(B, T, K + 4, size=1.5), dim=-1)[..., :K]
    valid = torch.ones(B, T, K, dtype=dtype)
    valid[1, 3, 1] = 0.0
    valid[0, 1] = 0.0
    return TokenBatch(
        logprobs_BT=logprobs,
        logprobs_sampled_BT=logprobs + noise(B, T, size=0.1),
        old_logprobs_BT=old,
        old_logprobs_sampled_BT=old + noise(B, T, size=0.1),
        reference_logprobs_BT=logprobs + noise(B, T, size=0.4),
        teacher_logprobs_BT=logprobs + noise(B, T, size=0.6),
        rollout_logprobs_BT=old + noise(B, T, size=0.2),
        entropy_BT=noise(B, T, size=1.0).abs(),
        mask_BT=mask,
        turn_ids_BT=turn_ids,
        opd_valid_BT=mask.clone(),
        reward_advantages_BT=noise(B, T, size=1.0),
        weights_BT=torch.exp(noise(B, T, size=0.2)),
        version_gap_BT=torch.full((B, T), 2.0, dtype=dtype),
        support=Support(
            ids_BTK=torch.randint(0, 9, (B, T, K), generator=generator),
            student_BTK=support,
            old_BTK=support + noise(B, T, K, size=0.25),
            teacher_BTK=torch.log_softmax(noise(B, T, K + 4, size=1.5), dim=-1)[..., :K],
            valid_BTK=valid,
            student_topk_ids_BTK=torch.randint(0, 9, (B, T, K), generator=generator),
        ),
        statistics=BatchStatistics(gap_mean=0.1, gap_std=0.7, clip_low=0.3, clip_high=0.5),
    )


def leaves(batch: TokenBatch) -> tuple[TokenBatch, list[Tensor]]:
    """The batch with fresh leaves where gradients flow: both log-probs, entropy, the support."""
    assert batch.support is not None
    inputs = [
        batch.logprobs_BT.detach().clone().requires_grad_(),
        batch.logprobs_sampled_BT.detach().clone().requires_grad_(),
        batch.entropy_BT.detach().clone().requires_grad_(),
        batch.support.student_BTK.detach().clone().requires_grad_(),
    ]
    return with_leaves(batch, inputs), inputs


def with_leaves(batch: TokenBatch, inputs: list[Tensor]) -> TokenBatch:
    """The batch with these tensors where gradients flow."""
    assert batch.support is not None
    return replace(
        batch,
        logprobs_BT=inputs[0],
        logprobs_sampled_BT=inputs[1],
        entropy_BT=inputs[2],
        support=replace(batch.support, student_BTK=inputs[3]),
    )


def rows(batch: TokenBatch, which: list[int]) -> TokenBatch:
    """The batch of some rows."""
    tensors = {
        name: value[which]
        for name in TokenBatch.__dataclass_fields__
        if isinstance(value := getattr(batch, name), Tensor)
    }
    assert batch.support is not None
    support = {name: getattr(batch.support, name)[which] for name in Support.__dataclass_fields__}
    return replace(batch, **tensors, support=Support(**support))
