"""Golden inputs in the form that a run's own functions take.

A golden case gives logits; a run has hidden states and an output layer. Logits are the hidden
states of an output layer that changes nothing. Shapes: B rows, T tokens, V vocabulary, K ids.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trainer.objectives.batch import NO_STATISTICS, GlobalCounts, Support, TokenBatch
from trainer.objectives.frame import LossSettings, ObjectiveResult, objective_loss
from trainer.objectives.linear.logprobs import CHUNK_TOKENS, LinearLogprobs, linear_logprobs
from trainer.objectives.options import ObjectiveOptions


def logprobs_of(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor | None = None,
    *,
    top_k: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> LinearLogprobs:
    """Log-probs of `tokens` [...] and of what else is asked for, flat: [N] and [N, K], with the
    gradient of `logits` [..., V].
    """
    size = logits.shape[-1]
    return linear_logprobs(
        logits.reshape(-1, size),
        torch.eye(size, dtype=logits.dtype),
        tokens.reshape(-1).long(),
        support_ids_NK=None
        if support_ids is None
        else support_ids.reshape(-1, support_ids.shape[-1]).long(),
        top_k=top_k,
        want_entropy="gradient",
        chunk_tokens=chunk_tokens,
    )


def sampled_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs [...] of one token per position."""
    return logprobs_of(logits, tokens).logprobs.reshape(tokens.shape)


def support_logprobs(logits: Tensor, ids: Tensor, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Log-probs [..., K] of several tokens per position."""
    found = logprobs_of(logits, ids[..., 0], ids, chunk_tokens=chunk_tokens).support_NK
    assert found is not None
    return found.reshape(ids.shape)


def top_ids(logits: Tensor, k: int, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """The likeliest ids [..., k], likeliest first."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long)
    found = logprobs_of(logits.detach(), tokens, top_k=k, chunk_tokens=chunk_tokens).topk_ids_NK
    assert found is not None
    return found.reshape(*logits.shape[:-1], k)


def token_batch(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    old_BT: Tensor | None = None,
    teacher_BT: Tensor | None = None,
    rollout_BT: Tensor | None = None,
    reference_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    rewards_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
    valid_BT: Tensor | None = None,
    support: Support | None = None,
) -> TokenBatch:
    """A micro-batch whose rows are turns, all sampled at temperature 1, with nothing to report
    where a case gives nothing.
    """
    now_BT = logprobs_BT.detach()
    zeros_BT, ones_BT = torch.zeros_like(now_BT), torch.ones_like(now_BT)
    old_BT = now_BT if old_BT is None else old_BT
    turns_BT = torch.arange(len(mask_BT)).unsqueeze(-1).expand(mask_BT.shape)
    return TokenBatch(
        logprobs_BT=logprobs_BT,
        logprobs_sampled_BT=logprobs_BT,
        old_logprobs_BT=old_BT,
        old_logprobs_sampled_BT=old_BT,
        reference_logprobs_BT=reference_BT,
        teacher_logprobs_BT=now_BT if teacher_BT is None else teacher_BT,
        rollout_logprobs_BT=old_BT if rollout_BT is None else rollout_BT,
        entropy_BT=zeros_BT if entropy_BT is None else entropy_BT,
        mask_BT=mask_BT,
        turn_ids_BT=torch.where(mask_BT > 0, turns_BT, -1),
        opd_valid_BT=ones_BT if valid_BT is None else valid_BT,
        reward_advantages_BT=zeros_BT if rewards_BT is None else rewards_BT,
        weights_BT=ones_BT if weights_BT is None else weights_BT,
        version_gap_BT=zeros_BT,
        support=support,
        statistics=NO_STATISTICS,
    )


def support_of(ids_BTK: Tensor, student_BTK: Tensor, teacher_BTK: Tensor) -> Support:
    """A support without empty places, of a student that has not moved."""
    return Support(
        ids_BTK=ids_BTK,
        student_BTK=student_BTK,
        old_BTK=student_BTK.detach(),
        teacher_BTK=teacher_BTK,
        valid_BTK=torch.ones_like(student_BTK.detach()),
    )


def loss_of(
    batch: TokenBatch,
    options: ObjectiveOptions,
    settings: LossSettings,
    *,
    sequences: int | None = None,
    turns: int | None = None,
) -> ObjectiveResult:
    """`objective_loss`, with other numbers to divide by where the reference has them."""
    counts = GlobalCounts.of(batch.mask_BT, batch.turn_ids_BT)
    counts = replace(
        counts,
        sequences=counts.sequences if sequences is None else sequences,
        turns=counts.turns if turns is None else turns,
    )
    return objective_loss(batch, options, settings, counts)
