"""Ratios of trainer to rollout engine: the tokens that can be compared, their ratios, and what
describes them. It decides nothing: no weight, no rejection.

Formulas: ALGORITHMS 4.1, 4.2 and 4.6. Nothing here has a gradient. Metrics have the names of the
rollout correction page. Each is a tensor without dimensions, NaN where there is nothing to measure,
so that the caller moves all of them at once. Sequences without a compared token are not counted.

Shapes: B rows, T tokens; N compared tokens; S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT

Metrics = dict[str, Tensor]
PREFIX = "rollout_corr/"
_EPSILON = 1e-8
_LARGEST_EXPONENT = 700.0


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


def compare(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    turn_ids_BT: Tensor | None,
) -> tuple[TokenSelection, ComparedTokens]:
    """The tokens at mask 1 and their sequences, and those of them that can be compared.

    A token whose trainer log-prob is not finite is not usable. A rollout log-prob of NaN says "not
    comparable": usable, not compared. An infinite one makes its whole sequence unusable. Raises
    ValueError for a token at mask 1 without a turn id.
    """
    selection = _select_tokens(train_logprobs_BT, rollout_logprobs_BT, mask_BT, turn_ids_BT)
    return selection, _flatten(train_logprobs_BT, rollout_logprobs_BT, selection)


def _select_tokens(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    turn_ids_BT: Tensor | None,
) -> TokenSelection:
    """Number the sequences and sort the tokens at mask 1."""
    active_BT = mask_BT > 0
    sequences_BT, num_sequences = _number_sequences(active_BT, turn_ids_BT)
    broken_BT = active_BT & ~torch.isfinite(train_logprobs_BT)
    infinite_BT = active_BT & torch.isinf(rollout_logprobs_BT)
    broken_S = active_BT.new_zeros(num_sequences)
    broken_S[sequences_BT[infinite_BT]] = True
    usable_BT = active_BT & ~broken_BT & ~at_tokens(broken_S, sequences_BT)
    return TokenSelection(
        active_BT=active_BT,
        usable_BT=usable_BT,
        compared_BT=usable_BT & torch.isfinite(rollout_logprobs_BT),
        sequences_BT=sequences_BT,
        num_sequences=num_sequences,
        broken_tokens=broken_BT.sum(),
        broken_sequences=broken_S.sum(),
    )


def _flatten(
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


def at_tokens(chosen_S: Tensor, sequences_BT: Tensor) -> Tensor:
    """True [B, T] at the tokens of chosen sequences."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Ratios as each token [N] and as each sequence [S] sees them.

    Either all tokens of a sequence share one ratio, and `log_S` is its logarithm, not clamped; or
    `sequence_S` is the mean of a sequence's ratios and `log_S` None.
    """

    token_N: Tensor
    sequence_S: Tensor
    log_S: Tensor | None


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clip(x, +-20))."""
    return torch.exp(torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def token_ratios(tokens: ComparedTokens) -> Ratios:
    """exp(clip(x))."""
    ratio_N = clamped_exp(tokens.log_ratio_N)
    return Ratios(token_N=ratio_N, sequence_S=tokens.mean_by_sequence(ratio_N), log_S=None)


def sequence_ratios(tokens: ComparedTokens, *, geometric: bool = False) -> Ratios:
    """exp(clip(sum of x)), or of the mean of x."""
    log_S = (tokens.mean_by_sequence if geometric else tokens.sum_by_sequence)(tokens.log_ratio_N)
    ratio_S = clamped_exp(log_S)
    return Ratios(token_N=ratio_S[tokens.sequence_N], sequence_S=ratio_S, log_S=log_S)


def numbers(metrics: Metrics) -> dict[str, float]:
    """All values at once: one synchronisation with the device."""
    device = next(iter(metrics.values())).device
    stacked = torch.stack(
        [value.to(device=device, dtype=torch.float64) for value in metrics.values()]
    )
    return dict(zip(metrics, stacked.tolist(), strict=True))


def mean(values: Tensor) -> Tensor:
    """sum / (count + 1e-8)."""
    if values.numel() == 0:
        return _missing(values)
    return values.sum() / (values.numel() + _EPSILON)


def fraction(chosen: Tensor) -> Tensor:
    """Share of true entries."""
    return chosen.double().mean() if chosen.numel() else _missing(chosen.double())


def largest(values: Tensor) -> Tensor:
    """Maximum."""
    return values.max() if values.numel() else _missing(values)


def smallest(values: Tensor) -> Tensor:
    """Minimum."""
    return values.min() if values.numel() else _missing(values)


def spread(values: Tensor) -> Tensor:
    """Standard deviation of exactly these values, not of a sample."""
    if values.numel() == 0:
        return _missing(values)
    # Centred first: mean(v^2) - mean(v)^2 cancels for weights close to 1.
    return (values - values.mean()).square().mean().sqrt()


def sample_spread(values: Tensor) -> Tensor:
    """Unbiased standard deviation; 0 for one value."""
    if values.numel() == 0:
        return _missing(values)
    return values.std() if values.numel() > 1 else values.new_zeros(())


def effective_share(weights: Tensor) -> Tensor:
    """Effective sample size as a share of the sample: 1 / mean((w / mean(w))^2); 0 if all are 0."""
    share = 1.0 / mean((weights / (mean(weights) + _EPSILON)).square())
    return torch.where(torch.isinf(share), torch.zeros_like(share), share)


def quantile(values: Tensor, share: float) -> Tensor:
    """The smallest value that at least `share` of the values do not exceed."""
    if values.numel() == 0:
        return _missing(values)
    # torch.quantile refuses more than 2^24 values.
    rank = min(max(math.ceil(share * values.numel()), 1), values.numel())
    return values.kthvalue(rank).values


def _missing(values: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=values.dtype, device=values.device)


def comparison_metrics(
    tokens: ComparedTokens, is_fresh_N: Tensor, after_tool_N: Tensor | None
) -> Metrics:
    """How far trainer and rollout engine are apart, whatever is corrected; `kl_fresh` is `kl` over
    the tokens that the newest weights sampled. With `after_tool_N` also those after tool output,
    and the others.
    """
    metrics = _off_policy_metrics(tokens)
    metrics[PREFIX + "kl_fresh"] = mean(-tokens.log_ratio_N[is_fresh_N])
    return metrics if after_tool_N is None else metrics | _tool_metrics(tokens, after_tool_N)


def _off_policy_metrics(tokens: ComparedTokens) -> Metrics:
    """`kl` takes log-ratios as they are; metrics that exponentiate them clamp first."""
    train_S = tokens.present(tokens.mean_by_sequence(tokens.train_N))
    rollout_S = tokens.present(tokens.mean_by_sequence(tokens.rollout_N))
    log_ratio_N = tokens.log_ratio_N
    clamped_N = torch.clamp(log_ratio_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    product_S = tokens.present(sequence_ratios(tokens).sequence_S)
    gap_S = rollout_S - train_S
    values = {
        "training_ppl": mean(_exp(-train_S)),
        "training_log_ppl": mean(-train_S),
        "rollout_ppl": mean(_exp(-rollout_S)),
        "rollout_log_ppl": mean(-rollout_S),
        "log_ppl_diff": mean(gap_S),
        "log_ppl_abs_diff": mean(gap_S.abs()),
        "log_ppl_diff_max": largest(gap_S),
        "log_ppl_diff_min": smallest(gap_S),
        "ppl_ratio": mean(_exp(gap_S)),
        "kl": mean(-log_ratio_N),
        "k3_kl": mean(torch.expm1(clamped_N) - clamped_N),
        "chi2_token": mean(clamped_exp(log_ratio_N).square()) - 1.0,
        "chi2_seq": mean(product_S.square()) - 1.0,
        "ratio_p99": quantile(clamped_exp(log_ratio_N), 0.99),
    }
    return {PREFIX + name: value for name, value in values.items()}


def ratio_metrics(
    values: Ratios,
    raw: Ratios,
    tokens: ComparedTokens,
    *,
    low: float,
    high: float,
    clamp: tuple[float, float],
) -> Metrics:
    """Statistics of ratios over tokens and over sequences, without a prefix.

    `values` are described; `raw`, the ratios before any bound, decide what is out of bounds.
    `clamp` bounds what deviation and effective sample size see.
    """
    value_S = tokens.present(values.sequence_S)
    raw_S = tokens.present(raw.sequence_S)
    clamped_N = values.token_N.clamp(min=clamp[0], max=clamp[1])
    over_S, under_S = raw_S > high, raw_S < low
    over, under = raw.token_N > high, raw.token_N < low
    maximum, minimum = largest(values.token_N), smallest(values.token_N)
    if raw.log_S is not None:
        log_S = tokens.present(raw.log_S)
        over_S, under_S = log_S > math.log(high), log_S < (math.log(low) if low > 0 else -math.inf)
        over, under = over_S, under_S
        maximum = torch.exp(largest(log_S).clamp(max=LOG_RATIO_LIMIT))
        minimum = _exp(smallest(log_S))
    return {
        "mean": mean(values.token_N),
        "std": spread(clamped_N),
        "min": minimum,
        "max": maximum,
        "eff_sample_size": effective_share(clamped_N),
        "ratio_fraction_high": fraction(over),
        "ratio_fraction_low": fraction(under),
        "seq_mean": mean(value_S),
        "seq_std": sample_spread(value_S),
        "seq_max": largest(value_S),
        "seq_min": smallest(value_S),
        "seq_max_deviation": largest((value_S - 1.0).abs()),
        "seq_fraction_high": fraction(over_S),
        "seq_fraction_low": fraction(under_S),
    }


def _tool_metrics(tokens: ComparedTokens, after_tool_N: Tensor) -> Metrics:
    """Ratios of tokens after tool output, and of the others (ALGORITHMS 6.8)."""
    ratio_N = clamped_exp(tokens.log_ratio_N)
    metrics: Metrics = {}
    for group, chosen_N in (("post_tool", after_tool_N), ("other", ~after_tool_N)):
        ratio, log_ratio = ratio_N[chosen_N], tokens.log_ratio_N[chosen_N]
        values = {
            "mean": mean(ratio),
            "std": spread(ratio),
            "p99": quantile(ratio, 0.99),
            "max": largest(ratio),
            "kl": mean(-log_ratio),
            "token_fraction": fraction(chosen_N),
        }
        metrics |= {f"{PREFIX}{group}/{name}": value for name, value in values.items()}
    return metrics


def _exp(values: Tensor) -> Tensor:
    """exp in float64 and finite, for logarithms of perplexities and products of ratios."""
    return torch.exp(values.to(torch.float64).clamp(max=_LARGEST_EXPONENT))
