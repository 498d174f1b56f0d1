"""What an objective sees of one micro-batch, the guard that every value passes first, and how
values per token become one number.

Log-probs are natural logarithms at temperature 1, except those named `sampled`, which are at each
token's own sampling temperature. Every reduction is a weight per token (ALGORITHMS 2.8):
`token_weights` gives the weight of each token, `weighted_sum` selects and then sums, so that
nothing at mask 0 (NaN included) can reach a result. A reduction over several micro-batches is the
sum of their weighted sums, given the counts of the GLOBAL batch.

Shapes: B rows, T tokens, K support entries or side samples per token. Element [b, t] is about token
t, not about the logit row that scores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.objectives.names import AggregationMode

_EPSILON = 1e-8


def selected(values: Tensor, mask: Tensor) -> Tensor:
    """The values at mask 1, zeros elsewhere: no garbage there reaches the arithmetic after it.

    Apply it to inputs, because a NaN that is selected away later still has a NaN gradient.
    """
    return torch.where(mask > 0, values, torch.zeros_like(values))


def weighted_sum(values_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum of value x weight over tokens with a weight; a differentiable zero if there are none."""
    return (selected(values_BT, weights_BT) * weights_BT).sum()


@torch.no_grad()
def token_weights(
    mask_BT: Tensor,
    mode: AggregationMode,
    *,
    turn_ids_BT: Tensor | None = None,
    num_turns: int | None = None,
    num_tokens: float | None = None,
    num_sequences: int | None = None,
    horizon: float | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Weight [B, T] of each token, 0 at mask 0.

    Global counts (`num_turns`, `num_tokens`, `num_sequences`) default to those of this batch. Empty
    rows and empty turns are not counted. A turn never spans two rows. `turn_ids_BT` is -1 where
    there is no policy token. Raises ValueError for an unknown mode, missing turn ids, and several
    ranks (`dp_size`) without the global count that the mode divides by.
    """
    if dp_size > 1:
        _require_global_count(mode, num_turns, num_tokens, num_sequences)
    if mode == "token-sum":
        return mask_BT * dp_size
    if mode == "token-mean":
        total = num_tokens if num_tokens is not None else float(mask_BT.sum())
        return mask_BT * (dp_size / max(total, 1.0))
    counts_B1 = mask_BT.sum(dim=-1, keepdim=True)
    rows = num_sequences if num_sequences is not None else int((counts_B1 > 0).sum())
    per_row = dp_size / max(rows, 1)
    if mode == "seq-mean-token-sum":
        return mask_BT * per_row
    if mode == "seq-mean-token-sum-norm":
        return mask_BT * (per_row / (horizon if horizon is not None else mask_BT.shape[-1]))
    if mode == "seq-mean-token-mean":
        return mask_BT * per_row / (counts_B1 + _EPSILON)
    if turn_ids_BT is None:
        raise ValueError(f"aggregation mode {mode!r} needs turn ids")
    counts_BT, turns_B1 = _turn_counts(mask_BT, turn_ids_BT)
    if mode == "turn-mean-token-mean":
        turns = num_turns if num_turns is not None else int(turns_B1.sum())
        return mask_BT * (dp_size / max(turns, 1)) / counts_BT
    if mode == "seq-mean-turn-mean":
        return mask_BT * per_row / (counts_BT * turns_B1.clamp(min=1))
    raise ValueError(f"unknown aggregation mode {mode!r}")


def count_turns(mask_BT: Tensor, turn_ids_BT: Tensor) -> int:
    """How many turns have at least one token at mask 1."""
    return int(torch.unique(turn_ids_BT[mask_BT > 0]).numel())


def sequence_means(values_BT: Tensor, mask_BT: Tensor, turn_ids_BT: Tensor | None = None) -> Tensor:
    """The mean over tokens at mask 1 of each token's own sequence [B, T], with gradient.

    With turn ids a sequence is one turn, else a row, and every token of it gets its mean, also at
    mask 0; 0 where there is no turn id or nothing at mask 1. Raises ValueError for a token at mask
    1 without turn id.
    """
    values_BT = selected(values_BT, mask_BT)
    if turn_ids_BT is None:
        counts_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp(min=1.0)
        return ((values_BT * mask_BT).sum(dim=-1, keepdim=True) / counts_B1).expand_as(values_BT)
    if bool((turn_ids_BT[mask_BT > 0] < 0).any()):
        raise ValueError("a token at mask 1 has no turn id")
    # A turn never spans two rows, whether its ids count per row or per batch.
    rows_B1 = torch.arange(values_BT.shape[0], device=values_BT.device).unsqueeze(-1)
    stride = int(turn_ids_BT.max()) + 1 if turn_ids_BT.numel() else 1
    keys_BT = rows_B1 * max(stride, 1) + turn_ids_BT.long().clamp(min=0)
    turns, turns_BT = torch.unique(keys_BT, return_inverse=True)
    # In float64, so that the order of accumulation does not matter.
    zeros = torch.zeros(turns.numel(), dtype=torch.float64, device=values_BT.device)
    counts = zeros.index_add(0, turns_BT.flatten(), mask_BT.flatten().double())
    sums = zeros.index_add(0, turns_BT.flatten(), (values_BT * mask_BT).flatten().double())
    means_BT = (sums / counts.clamp(min=1.0))[turns_BT].to(values_BT.dtype)
    return selected(means_BT, turn_ids_BT >= 0)


def _require_global_count(
    mode: AggregationMode,
    num_turns: int | None,
    num_tokens: float | None,
    num_sequences: int | None,
) -> None:
    """A rank that divides by its own count would weigh its tokens by how few it has."""
    needed = {"token-mean": ("num_tokens", num_tokens), "token-sum": ("", 0)}
    needed["turn-mean-token-mean"] = ("num_turns", num_turns)
    name, value = needed.get(mode, ("num_sequences", num_sequences))
    if value is None:
        raise ValueError(f"aggregation mode {mode!r} over several ranks needs {name} of them all")


def _turn_counts(mask_BT: Tensor, turn_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens at mask 1 of each token's own turn [B, T], at least 1; non-empty turns per row [B, 1].

    Integer counts, so that the result does not depend on the order of accumulation.
    """
    active_BT = mask_BT > 0
    if bool((turn_ids_BT[active_BT] < 0).any()):
        raise ValueError("a token at mask 1 has no turn id")
    flat = turn_ids_BT[active_BT]
    counts = torch.bincount(flat, minlength=1)
    counts_BT = torch.ones_like(mask_BT)
    counts_BT[active_BT] = counts[flat].to(mask_BT.dtype)
    # Each turn contributes its tokens' 1/count, which sum to one per turn.
    shares_BT = torch.where(active_BT, 1.0 / counts_BT, torch.zeros_like(counts_BT))
    return counts_BT, shares_BT.sum(dim=-1, keepdim=True).round()


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Several tokens at every position: a top-k support, or m side samples; all [B, T, K].

    `ids_BTK` are the tokens; `student_BTK` carries gradients; `old_BTK` is the student at the start
    of the batch (side samples: the policy that drew them), `teacher_BTK` the teacher. `valid_BTK`
    is 0 where a place of the support is empty. `student_topk_ids_BTK` are the student's likeliest
    tokens, if asked for.
    """

    ids_BTK: Tensor
    student_BTK: Tensor
    old_BTK: Tensor
    teacher_BTK: Tensor
    valid_BTK: Tensor
    student_topk_ids_BTK: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """Figures of the whole batch that an objective asked for; NaN where it did not.

    `gap_mean` and `gap_std` are of the teacher's advantage over the tokens where it acts (7.3);
    `unnormalised` counts those that were too few or too alike and were therefore left as they are.
    `clip_low` and `clip_high` the clip that M2PO's budget leaves.
    """

    gap_mean: float = float("nan")
    gap_std: float = float("nan")
    unnormalised: float = float("nan")
    clip_low: float = float("nan")
    clip_high: float = float("nan")


NO_STATISTICS = BatchStatistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """One micro-batch; all [B, T] except the support.

    `logprobs_BT` and `logprobs_sampled_BT` carry gradients (the same tensor where every temperature
    is 1); `old_*` are the same two at the start of the batch. `rollout_logprobs_BT` is NaN where it
    cannot be compared. `teacher_logprobs_BT` is NaN and `opd_valid_BT` 0 for turns without a
    teacher. `advantages_BT` are those of rewards alone, `weights_BT` the detached weights of
    rollout correction, `version_gap_BT` the steps between sampling and training.
    `compared_logprobs_BT` are what that correction compares with the rollout engine, at the
    sampling temperature, where that is not `old_logprobs_sampled_BT`. `emphasis_BT` multiplies what
    the teacher teaches at a token; None: by 1 everywhere. `sampling_logprobs_BT` is the policy at
    the weights and the temperature that sampled, where an objective asks for it.
    """

    logprobs_BT: Tensor
    logprobs_sampled_BT: Tensor
    old_logprobs_BT: Tensor
    old_logprobs_sampled_BT: Tensor
    reference_logprobs_BT: Tensor | None
    teacher_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    entropy_BT: Tensor
    mask_BT: Tensor
    turn_ids_BT: Tensor
    opd_valid_BT: Tensor
    reward_advantages_BT: Tensor
    weights_BT: Tensor
    version_gap_BT: Tensor
    compared_logprobs_BT: Tensor | None = None
    support: Support | None = None
    statistics: BatchStatistics = NO_STATISTICS
    emphasis_BT: Tensor | None = None
    sampling_logprobs_BT: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """An objective's value per token [B, T] with gradient, and detached reports per token.

    A report in `means` is averaged like the loss; of one in `ranges` the smallest and the largest
    value over tokens with a teacher are kept. `advantages_BT` are what the objective pushes each
    token by; `gap_BT` is the teacher's log-prob of the sampled token minus the student's,
    unclamped, and 0 without a teacher; it is compared with the noise between engines. `weights_BT`
    are those that the objective applied in place of the batch's; None: it has none of its own.
    """

    loss_BT: Tensor
    advantages_BT: Tensor
    gap_BT: Tensor
    means: dict[str, Tensor]
    ranges: dict[str, Tensor] = field(default_factory=dict)
    weights_BT: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Non-empty turns and sequences, and tokens, of the GLOBAL batch: the denominators."""

    turns: int
    sequences: int
    tokens: float

    @staticmethod
    def of(mask_BT: Tensor, turn_ids_BT: Tensor) -> GlobalCounts:
        """The counts of these rows alone."""
        return GlobalCounts(
            turns=count_turns(mask_BT, turn_ids_BT),
            sequences=int((mask_BT.sum(dim=-1) > 0).sum()),
            tokens=float(mask_BT.sum()),
        )

    def denominator(self, mode: AggregationMode) -> float:
        """What a reduction divides by; 1 for a sum."""
        if mode == "token-sum":
            return 1.0
        if mode == "token-mean":
            return self.tokens
        return float(self.turns if mode == "turn-mean-token-mean" else self.sequences)

    def __add__(self, other: GlobalCounts) -> GlobalCounts:
        return GlobalCounts(
            turns=self.turns + other.turns,
            sequences=self.sequences + other.sequences,
            tokens=self.tokens + other.tokens,
        )


def reduction_weights(
    batch: TokenBatch, mode: AggregationMode, counts: GlobalCounts, horizon: int | None = None
) -> Tensor:
    """Weight [B, T] of each token under the mode's global denominators."""
    return token_weights(
        batch.mask_BT,
        mode,
        turn_ids_BT=batch.turn_ids_BT,
        num_turns=counts.turns,
        num_tokens=counts.tokens,
        num_sequences=counts.sequences,
        horizon=horizon,
    )


NO_COUNTS = GlobalCounts(turns=0, sequences=0, tokens=0.0)


def select_finite(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """The batch with zeros wherever the mask is 0, and how many tokens the guard took out.

    A non-finite value of the trainer's own takes its token out of the mask (ALGORITHMS 0.1). A
    teacher's log-prob must be finite where `opd_valid_BT` says there is one. Otherwise it raises
    ValueError, since such samples were dropped before.
    """
    mask_BT = batch.mask_BT > 0
    finite_BT = mask_BT.clone()
    for values_BT in _own_values(batch):
        finite_BT &= torch.isfinite(values_BT.detach())
    support = batch.support
    if support is not None:
        empty_BTK = support.valid_BTK <= 0
        for values_BTK in (support.student_BTK.detach(), support.old_BTK):
            finite_BT &= (torch.isfinite(values_BTK) | empty_BTK).all(dim=-1)
        if not bool((torch.isfinite(support.teacher_BTK) | empty_BTK)[finite_BT].all()):
            raise ValueError("a teacher log-prob of a support at a policy token is not finite")
    taught_BT = finite_BT & (batch.opd_valid_BT > 0)
    if not bool(torch.isfinite(batch.teacher_logprobs_BT[taught_BT]).all()):
        raise ValueError("a teacher log-prob at a policy token is not finite")

    def select(values_BT: Tensor, where_BT: Tensor = finite_BT) -> Tensor:
        return torch.where(where_BT, values_BT, torch.zeros_like(values_BT))

    same = batch.logprobs_sampled_BT is batch.logprobs_BT
    same_old = batch.old_logprobs_sampled_BT is batch.old_logprobs_BT
    logprobs_BT, old_BT = select(batch.logprobs_BT), select(batch.old_logprobs_BT)
    reference_BT, compared_BT = batch.reference_logprobs_BT, batch.compared_logprobs_BT
    sampling_BT = batch.sampling_logprobs_BT
    clean = replace(
        batch,
        logprobs_BT=logprobs_BT,
        logprobs_sampled_BT=logprobs_BT if same else select(batch.logprobs_sampled_BT),
        old_logprobs_BT=old_BT,
        old_logprobs_sampled_BT=old_BT if same_old else select(batch.old_logprobs_sampled_BT),
        reference_logprobs_BT=None if reference_BT is None else select(reference_BT),
        teacher_logprobs_BT=select(batch.teacher_logprobs_BT, taught_BT),
        rollout_logprobs_BT=select(batch.rollout_logprobs_BT),
        entropy_BT=select(batch.entropy_BT),
        mask_BT=finite_BT.to(batch.mask_BT.dtype),
        opd_valid_BT=select(batch.opd_valid_BT),
        reward_advantages_BT=select(batch.reward_advantages_BT),
        weights_BT=select(batch.weights_BT),
        version_gap_BT=select(batch.version_gap_BT),
        compared_logprobs_BT=None if compared_BT is None else select(compared_BT),
        support=None if support is None else _select_support(support, finite_BT),
        sampling_logprobs_BT=None if sampling_BT is None else select(sampling_BT),
    )
    return clean, (mask_BT & ~finite_BT).sum()


def _own_values(batch: TokenBatch) -> list[Tensor]:
    values = [
        batch.logprobs_BT,
        batch.logprobs_sampled_BT,
        batch.old_logprobs_BT,
        batch.old_logprobs_sampled_BT,
    ]
    further = (batch.reference_logprobs_BT, batch.sampling_logprobs_BT)
    return values + [one for one in further if one is not None]


def _select_support(support: Support, finite_BT: Tensor) -> Support:
    used_BTK = finite_BT.unsqueeze(-1) & (support.valid_BTK > 0)

    def select(values_BTK: Tensor) -> Tensor:
        return torch.where(used_BTK, values_BTK, torch.zeros_like(values_BTK))

    return replace(
        support,
        student_BTK=select(support.student_BTK),
        old_BTK=select(support.old_BTK),
        teacher_BTK=select(support.teacher_BTK),
        valid_BTK=used_BTK.to(support.valid_BTK.dtype),
    )
