"""Whether what slime hands to the advantage hook is the batch that was handed to slime, and whether
it can teach anything (ALGORITHMS 0.1 and 7.7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rollout_bridge.slime.carrier import BatchFacts, RowCarrier
from trainer.config import TrainerConfig
from trainer.errors import DistillationOffError, NonFiniteError
from trainer.objectives.batch import GlobalCounts
from trainer.slime.batch_metrics import TurnFigures


class RankFigures(NamedTuple):
    """What a data rank sends to the others."""

    facts: BatchFacts
    counts: GlobalCounts
    turns: list[TurnFigures]
    nonfinite: float


def take_carriers(rollout_data: dict[str, Any]) -> list[RowCarrier]:
    """The carriers of this rank's rows in one step on the batch, checked against slime's own keys,
    and removed from these, as slime's log cannot handle them.
    """
    carriers = rollout_data.pop("prompt", None)
    lengths, totals = rollout_data["response_lengths"], rollout_data["total_lengths"]
    if carriers is None or len(carriers) != len(lengths) or "rollout_log_probs" not in rollout_data:
        raise ValueError(
            "slime's rollout data have no carrier per row: set "
            "--custom-convert-samples-to-train-data-path to this project's"
        )
    steps, planned = len(rollout_data["num_microbatches"]), carriers[0].batch.epochs
    if steps != planned:
        raise ValueError(
            f"slime makes {steps} steps of one batch, and {planned} were planned; its "
            "global_batch_size must be the number of distinct rollout ids of one of them"
        )
    for place, carrier in enumerate(carriers):
        mask = rollout_data["loss_masks"][place]
        _check_row(carrier, rollout_data["tokens"][place], mask, lengths[place], totals[place])
    return _of_each_step(carriers, steps)


def _of_each_step(carriers: Sequence[RowCarrier], steps: int) -> list[RowCarrier]:
    """The carriers of the first step. Raises ValueError unless every step has the same rows on this
    rank, in one order: the later ones compare with what the first one notes.
    """
    rows = [(one.num_tokens, [turn.index for turn in one.turns]) for one in carriers]
    number, rest = divmod(len(rows), steps)
    if rest:
        raise ValueError(f"slime gave {len(rows)} rows for {steps} equal steps on a batch")
    for step in range(steps):
        if rows[step * number : (step + 1) * number] != rows[:number]:
            raise ValueError(
                f"slime gave step {step + 1} of {steps} on a batch other rows, or in another order"
            )
    return list(carriers[:number])


def _check_row(
    carrier: RowCarrier, tokens: Tensor, mask: Tensor, response_length: int, total_length: int
) -> None:
    """Whether a carrier describes the row that it came with (ALGORITHMS 7.7)."""
    name = carrier.turns[0].sample.turn_id if carrier.turns else "(a row without turns)"
    if (carrier.num_tokens, carrier.response_length) != (total_length, response_length):
        raise ValueError(
            f"turn {name}: its row has {total_length} tokens, {response_length} of them response, "
            f"and its carrier {carrier.num_tokens} and {carrier.response_length}"
        )
    if mask.tolist() != carrier.loss_mask():
        raise ValueError(f"turn {name}: the loss mask of its row is not that of its turns")
    ids = tokens.cpu().numpy()
    for turn in carrier.turns:
        if not np.array_equal(ids[turn.start : turn.end], turn.sample.response_ids):
            raise ValueError(f"turn {turn.sample.turn_id}: its row has other tokens")


def check_complete(parts: Sequence[RankFigures], carriers: Sequence[RowCarrier]) -> None:
    """Raises ValueError unless the ranks together have every turn of one batch once."""
    facts = carriers[0].batch
    sent = facts.without_histories()
    if any(part.facts != sent for part in parts) or any(one.batch != facts for one in carriers):
        raise ValueError("rows of different batches are in one step")
    found = sorted(turn.index for part in parts for turn in part.turns)
    if found != list(range(len(facts.turns))):
        raise ValueError(
            f"ranks hold {len(found)} turns of a batch of {len(facts.turns)}; slime leaves out "
            "rows where global_batch_size is not the number of distinct rollout ids"
        )


def check_finite(nonfinite: float, tokens: float, trainer: TrainerConfig) -> None:
    """Raises NonFiniteError for too many tokens without a log-prob in the trainer."""
    if nonfinite > trainer.max_nonfinite_frac * (tokens + nonfinite):
        raise NonFiniteError(
            f"{nonfinite:.0f} of {tokens + nonfinite:.0f} tokens have a non-finite log-prob in the "
            f"trainer; max_nonfinite_frac is {trainer.max_nonfinite_frac}"
        )


def check_taught(metrics: dict[str, float]) -> None:
    """Raises DistillationOffError where turns have a teacher and none of their tokens has."""
    has_tokens = metrics["batch/tokens"] > 0 and metrics["opd/num_eligible_samples"] > 0
    if has_tokens and metrics["opd/frac_tokens_with_kd"] == 0:
        raise DistillationOffError("samples are eligible, but no token has a teacher's score")
