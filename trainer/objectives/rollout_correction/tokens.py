"""Which tokens of a padded batch are compared, and to which sequence each of them belongs.

Selection comes first: everything after this works on flat tokens that are finite, so that nothing
at mask 0 can reach a result (ALGORITHMS 0.1). With turn ids a sequence is a turn (6.8).

Shapes: B rows, T tokens, N compared tokens, S sequences with at least one token at mask 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """Booleans [B, T] over the tokens at mask 1, and their sequences.

    `active_BT` are those at mask 1; `usable_BT` those left after the guards; `compared_BT` those
    with a ratio. `sequences_BT` numbers sequences from 0, -1 at mask 0. The counts are what the
    guards took out.
    """

    active_BT: Tensor
    usable_BT: Tensor
    compared_BT: Tensor
    sequences_BT: Tensor
    num_sequences: int
    broken_tokens: Tensor
    broken_sequences: Tensor

    def at_tokens(self, chosen_S: Tensor) -> Tensor:
        """True [B, T] at the tokens of chosen sequences."""
        return _at_tokens(chosen_S, self.sequences_BT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTokens:
    """The compared tokens, flat: log-probs and x = train - rollout, not clamped, all [N].

    `counts_S` are compared tokens per sequence, 0 for some.
    """

    train_N: Tensor
    rollout_N: Tensor
    log_ratio_N: Tensor
    sequence_N: Tensor
    counts_S: Tensor

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        """Sums [S]; 0 where nothing is compared. Accumulated in float64."""
        sums_S = torch.zeros(self.counts_S.shape, dtype=torch.float64, device=values_N.device)
        sums_S.index_add_(0, self.sequence_N, values_N.to(torch.float64))
        return sums_S.to(values_N.dtype)

    def mean_by_sequence(self, values_N: Tensor) -> Tensor:
        """Means [S]; 0 where nothing is compared."""
        return self.sum_by_sequence(values_N) / self.counts_S.clamp(min=1)

    def max_by_sequence(self, values_N: Tensor) -> Tensor:
        """Maxima [S] of values that are at least 0."""
        maxima_S = torch.zeros(self.counts_S.shape, dtype=values_N.dtype, device=values_N.device)
        return maxima_S.scatter_reduce_(0, self.sequence_N, values_N, "amax")

    def present(self, values_S: Tensor) -> Tensor:
        """The values of sequences with a compared token."""
        return values_S[self.counts_S > 0]


def select_tokens(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    turn_ids_BT: Tensor | None,
) -> TokenSelection:
    """Number the sequences and sort the tokens at mask 1.

    A token whose trainer log-prob is not finite is not usable. A rollout log-prob of NaN says "not
    comparable": usable, not compared. An infinite one makes its whole sequence unusable. Raises
    ValueError for a token at mask 1 without a turn id.
    """
    active_BT = mask_BT > 0
    sequences_BT, num_sequences = _number_sequences(active_BT, turn_ids_BT)
    broken_BT = active_BT & ~torch.isfinite(train_logprobs_BT)
    infinite_BT = active_BT & torch.isinf(rollout_logprobs_BT)
    broken_S = active_BT.new_zeros(num_sequences)
    broken_S[sequences_BT[infinite_BT]] = True
    usable_BT = active_BT & ~broken_BT & ~_at_tokens(broken_S, sequences_BT)
    return TokenSelection(
        active_BT=active_BT,
        usable_BT=usable_BT,
        compared_BT=usable_BT & torch.isfinite(rollout_logprobs_BT),
        sequences_BT=sequences_BT,
        num_sequences=num_sequences,
        broken_tokens=broken_BT.sum(),
        broken_sequences=broken_S.sum(),
    )


def compare(
    train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, selection: TokenSelection
) -> ComparedTokens:
    """Flatten the compared tokens; at least float32."""
    dtype = torch.promote_types(train_logprobs_BT.dtype, torch.float32)
    train_N = train_logprobs_BT[selection.compared_BT].to(dtype)
    rollout_N = rollout_logprobs_BT[selection.compared_BT].to(dtype)
    sequence_N = selection.sequences_BT[selection.compared_BT]
    return ComparedTokens(
        train_N=train_N,
        rollout_N=rollout_N,
        log_ratio_N=train_N - rollout_N,
        sequence_N=sequence_N,
        counts_S=torch.bincount(sequence_N, minlength=selection.num_sequences),
    )


def _at_tokens(chosen_S: Tensor, sequences_BT: Tensor) -> Tensor:
    # Index -1, mask 0, is the entry appended here.
    return torch.cat([chosen_S, chosen_S.new_zeros(1)])[sequences_BT]


def _number_sequences(active_BT: Tensor, turn_ids_BT: Tensor | None) -> tuple[Tensor, int]:
    rows_BT = torch.arange(active_BT.shape[0], device=active_BT.device)[:, None]
    rows_BT = rows_BT.expand(active_BT.shape)
    keys_BT = rows_BT
    if turn_ids_BT is not None:
        if bool((turn_ids_BT[active_BT] < 0).any()):
            raise ValueError("rollout correction: a token at mask 1 has no turn id")
        # A turn never spans two rows, whether its ids count per row or per batch.
        stride = int(turn_ids_BT.max()) + 1 if turn_ids_BT.numel() else 1
        keys_BT = rows_BT * max(stride, 1) + turn_ids_BT.long()
    unique, numbers = torch.unique(keys_BT[active_BT], return_inverse=True)
    sequences_BT = torch.full(active_BT.shape, -1, dtype=torch.long, device=active_BT.device)
    sequences_BT[active_BT] = numbers
    return sequences_BT, int(unique.numel())
