"""The reverse KL from m sampled tokens per position, corrected for a student that moved on.

Formulas: ALGORITHMS 5.2 to 5.4. `old` is the policy that SAMPLED, at its own temperature. With the
advantage of the current student and no clip the expected gradient is that of the dense reverse KL;
every other choice is an ablation. Samples must be drawn with replacement from the untruncated
distribution, or the ratio is wrong. It knows no reduction over positions.

Shapes: B rows, T tokens, M side samples per position, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms, selected
from trainer.objectives.distributions.kl import divergence_terms, needed_support
from trainer.objectives.options import SideSampleOptions
from trainer.objectives.policy.ppo import ppo_clip

AdvantageReference = Literal["current", "old"]
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateTerms:
    """Per sample, shaped like the inputs; every field but `loss` is detached.

    `ratio` is 1 without importance weighting. `above` and `below` are 1.0 where it is outside the
    clip, whichever branch the loss then takes.
    """

    loss: Tensor
    ratio: Tensor
    advantages: Tensor
    above: Tensor
    below: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSampleTerms:
    """`loss_BT` is the mean over samples; `samples` holds what each of them [B, T, M] gave."""

    loss_BT: Tensor
    samples: SurrogateTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSamples:
    """Token ids [..., M] (int64) and their log-probs (float32); id 0 and NaN at mask 0."""

    ids: Tensor
    logprobs: Tensor


def stale_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    advantage_reference: AdvantageReference = "current",
    clip_low: float | None = None,
    clip_high: float | None = None,
    importance: bool = True,
) -> SurrogateTerms:
    """-rho sg(A) per sampled token, any shape: rho = exp(clip(l - lo, +-20)), A = lt - l.

    `advantage_reference` old makes that A = lt - lo. `l` and `lt` are at temperature 1, `lo` is the
    log-prob under the distribution that drew the token. A clip makes it the PPO surrogate; None
    leaves that side open. Without `importance` rho is 1 in value and has the gradient of l. Raises
    ValueError for an unknown reference.
    """
    if advantage_reference not in ("current", "old"):
        raise ValueError(f"advantage_reference is current or old, got {advantage_reference!r}")
    current, old = logprobs.detach(), old_logprobs.detach()
    reference = current if advantage_reference == "current" else old
    advantages = teacher_logprobs.detach() - reference
    sampler = old if importance else current
    low = math.inf if clip_low is None else clip_low
    high = math.inf if clip_high is None else clip_high
    terms = ppo_clip(logprobs, sampler, advantages, clip_low=low, clip_high=high)
    return SurrogateTerms(
        loss=terms.loss,
        ratio=terms.ratio,
        advantages=advantages,
        above=(terms.ratio > 1.0 + high).to(logprobs.dtype),
        below=(terms.ratio < 1.0 - low).to(logprobs.dtype),
    )


def side_samples(
    current_logprobs_BTM: Tensor,
    old_logprobs_BTM: Tensor,
    teacher_logprobs_BTM: Tensor,
    valid_BTM: Tensor | None = None,
    *,
    advantage_reference: AdvantageReference = "current",
    clip_low: float | None = None,
    clip_high: float | None = None,
    importance: bool = True,
    sample_weights_BTM: Tensor | None = None,
) -> SideSampleTerms:
    """Mean over the samples of `stale_surrogate`: the estimate of the reverse KL at a position.

    Samples at `valid_BTM` 0 are ignored, whatever their values. `sample_weights_BTM` (detached)
    take the place of the mean: with every token of the vocabulary as sample and its old probability
    as weight the result is the exact expectation.
    """
    used_BTM = _used(current_logprobs_BTM, valid_BTM)
    samples = stale_surrogate(
        selected(current_logprobs_BTM, used_BTM),
        selected(old_logprobs_BTM, used_BTM),
        selected(teacher_logprobs_BTM, used_BTM),
        advantage_reference=advantage_reference,
        clip_low=clip_low,
        clip_high=clip_high,
        importance=importance,
    )
    return SideSampleTerms(
        loss_BT=_mean(samples.loss, used_BTM, sample_weights_BTM), samples=samples
    )


def side_sample_forward_kl(
    current_logprobs_BTM: Tensor,
    teacher_logprobs_BTM: Tensor,
    valid_BTM: Tensor | None = None,
    *,
    sample_weights_BTM: Tensor | None = None,
) -> Tensor:
    """Mean over samples of lt - l [B, T]: the forward KL, for samples drawn from the TEACHER."""
    used_BTM = _used(current_logprobs_BTM, valid_BTM)
    teacher_BTM = selected(teacher_logprobs_BTM, used_BTM).detach()
    gap_BTM = teacher_BTM - selected(current_logprobs_BTM, used_BTM)
    return _mean(gap_BTM, used_BTM, sample_weights_BTM)


@torch.no_grad()
def draw_side_samples(
    logits: Tensor,
    num_samples: int,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> DrawnSamples:
    """Draw M tokens per position, independently and with replacement, from softmax(logits).

    `logits` [..., V] must be those of the sampling policy at its temperature, with no top-p or
    top-k (the old STUDENT, not the teacher: ALGORITHMS 9 item 20); the log-probs are of the same
    distribution. The trajectory's own token may replace a sample only if that distribution drew it
    too. Positions at mask 0 are ignored. Raises ValueError for less than one sample, a mask of
    another shape, or a row of logits that is not a distribution (-inf is fine: a token that never
    occurs).
    """
    if num_samples < 1:
        raise ValueError(f"draw_side_samples: needs at least one sample, got {num_samples}")
    shape = (*logits.shape[:-1], num_samples)
    used = torch.ones(shape[:-1], device=logits.device) if mask is None else mask
    if used.shape != logits.shape[:-1]:
        raise ValueError(
            f"draw_side_samples: mask {tuple(used.shape)} for logits {tuple(logits.shape)}; "
            "give one mask entry per position"
        )
    rows = torch.nonzero(used.reshape(-1) > 0).squeeze(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    ids = torch.zeros((flat.shape[0], num_samples), dtype=torch.int64, device=logits.device)
    logprobs = torch.full(ids.shape, torch.nan, dtype=torch.float32, device=logits.device)
    for chunk in rows.split(_ROWS_AT_ONCE):
        all_logprobs = torch.log_softmax(flat[chunk].float(), dim=-1)
        if bool(torch.isnan(all_logprobs).any()):
            raise ValueError("draw_side_samples: a row of logits is not finite; mask it out")
        drawn = torch.multinomial(
            all_logprobs.exp(), num_samples, replacement=True, generator=generator
        )
        ids[chunk] = drawn
        logprobs[chunk] = all_logprobs.gather(-1, drawn)
    return DrawnSamples(ids=ids.reshape(shape), logprobs=logprobs.reshape(shape))


def _used(logprobs_BTM: Tensor, valid_BTM: Tensor | None) -> Tensor:
    if valid_BTM is None:
        return torch.ones_like(logprobs_BTM, dtype=torch.bool)
    return (valid_BTM > 0).expand_as(logprobs_BTM)


def _mean(values_BTM: Tensor, used_BTM: Tensor, weights_BTM: Tensor | None) -> Tensor:
    values_BTM = selected(values_BTM, used_BTM)
    if weights_BTM is not None:
        return (values_BTM * selected(weights_BTM, used_BTM).detach()).sum(dim=-1)
    return values_BTM.sum(dim=-1) / used_BTM.sum(dim=-1).clamp(min=1)


def side_sample_terms(batch: TokenBatch, options: SideSampleOptions) -> TokenTerms:
    """Multi-sample Monte Carlo of KL(student || teacher), or of KL(teacher || student) (ALGORITHMS
    5.2, 5.4).
    """
    support = needed_support(batch, options.name)
    if options.direction == "forward":
        value_BT = side_sample_forward_kl(
            support.student_BTK, support.teacher_BTK, support.valid_BTK
        )
        return divergence_terms(batch, value_BT, {})
    result = side_samples(
        support.student_BTK,
        support.old_BTK,
        support.teacher_BTK,
        support.valid_BTK,
        advantage_reference=options.advantage_reference,
        clip_low=options.clip,
        clip_high=options.clip,
        importance=options.importance,
    )
    samples = result.samples
    means = {
        "opd/side_ratio": samples.ratio.mean(dim=-1),
        "opd/side_ratio_max": samples.ratio.amax(dim=-1),
        "opd/side_advantage": samples.advantages.mean(dim=-1),
        "opd/side_clipfrac": (samples.above + samples.below).mean(dim=-1),
    }
    return divergence_terms(batch, result.loss_BT, means)
