"""What a training step reports about each of its turns and lessons: sums, and numbers per token.

R is the number of response tokens. A number that is not known is NaN, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from sqlalchemy import Row

from records.training.teaching import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """What the last pass of a step computed at each token; all float32 [R], NaN where it is not
    known.

    `log_ratios` is log of the policy over the policy that the objective's ratio compares it with,
    at the sampling temperature, within +-20. `weights` are those of rollout correction as they were
    applied, to the tokens that trained. `entropies` of the policy's next token, in nats, at
    temperature 1. `engine_gaps` is |log-prob in the trainer - log-prob in the engine that sampled|
    in nats, of the log-probs that rollout correction compared. Raises ValueError for lengths that
    differ.
    """

    log_ratios: Logprobs = field(repr=False)
    weights: Logprobs = field(repr=False)
    entropies: Logprobs = field(repr=False)
    engine_gaps: Logprobs = field(repr=False)

    def __post_init__(self) -> None:
        lengths = {one.name: len(getattr(self, one.name)) for one in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"figures of one step have different lengths: {lengths}")


_COLUMNS = tuple(one.name for one in fields(TokenFigures))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What training did with one turn or lesson; written with the version that trained it.

    `advantages` [R] are NaN at tokens that the step left out. `figures` are None where its trainer
    did not report them; those of lessons are not stored. Raises ValueError for lengths that differ.
    """

    turn_id: str
    staleness: int
    advantage_mean: float
    advantage_abs_max: float
    advantages: Logprobs = field(repr=False)
    figures: TokenFigures | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        number = len(self.advantages)
        if self.figures is not None and len(self.figures.log_ratios) != number:
            raise ValueError(f"turn {self.turn_id}: {number} advantages and other figures")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample(SampleResult):
    """The same as it is stored, of the step that made `version`; without `figures` if it is from a
    program that did not store them.
    """

    version: int
    created_at: float


def figure_columns(result: SampleResult) -> dict[str, Logprobs | None]:
    """Columns of a sample's row. Weights that are the same for all tokens that trained, as those of
    a whole turn and those without a correction are, are stored once.
    """
    figures = result.figures
    if figures is None:
        return dict.fromkeys(_COLUMNS)
    columns: dict[str, Logprobs | None] = {name: getattr(figures, name) for name in _COLUMNS}
    is_trained = ~np.isnan(result.advantages)
    used = figures.weights[is_trained]
    is_one = len(used) > 0 and bool((used == used[0]).all())
    if is_one and np.isnan(figures.weights[~is_trained]).all():
        columns["weights"] = used[:1]
    return columns


def stored_sample(row: Row[Any]) -> StoredSample:
    """A sample from its row. Figures of other lengths than its advantages are not known: the row is
    damaged, which `verify` finds.
    """
    values = row._asdict()
    columns = {name: values.pop(name) for name in _COLUMNS}
    advantages = values["advantages"]
    if columns["weights"] is not None and len(columns["weights"]) == 1:
        one = np.where(np.isnan(advantages), np.nan, columns["weights"])
        columns["weights"] = one.astype(np.float32)
    fits = all(one is not None and len(one) == len(advantages) for one in columns.values())
    return StoredSample(**values, figures=TokenFigures(**columns) if fits else None)
