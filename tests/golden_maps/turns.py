"""Turns of a golden case through a run's own path: preparation of the batch, micro-batches and the
gradient of the whole batch.

A case gives log-probs, a run has models that give them. Every token of every turn has an id of its
own here, and a model is a table from ids to log-probs, so the policy's gradient is that of each
token's log-prob. Shape: R tokens of a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from records.types import PastAnswer, PromptHistory, ReadySample, VersionSpan
from tests.trainer.tiny import sample
from trainer.batch.collate import TurnScores
from trainer.batch.token_batch import BatchTotals, Correction
from trainer.config import TrainerConfig
from trainer.model.token_states import PLAIN, TokenLogprobs, TokenRequest
from trainer.step.preparation import PreparedBatch
from trainer.step.update import Updater

NEWEST = 100
"""The version of the policy before the step."""
MICRO_BATCH_TOKENS = 12
"""Few, so that batches of several turns are several micro-batches."""


class Table:
    """A model that gives each token id its log-prob, whatever comes before."""

    shares_prefixes = False
    recomputes = False
    device = torch.device("cpu")

    def __init__(self, values: Sequence[float]):
        self.values = torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))
        self.vocab_size = len(values)

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The table."""
        return [self.values]

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """Log-probs of the tokens at mask 1."""
        zeros_BT = torch.zeros_like(mask_BT)
        found_BT = torch.where(mask_BT > 0, self.values[ids_BT], zeros_BT)
        return TokenLogprobs(
            logprobs_BT=found_BT, logprobs_sampled_BT=found_BT, entropy_BT=zeros_BT
        )


class Older:
    """The policy at the versions that sampled: it knows only the tokens of its own turns."""

    def __init__(self, tables: Mapping[int, Table]):
        self._tables = tables

    def has(self, version: int) -> bool:
        """Whether a turn was sampled by it."""
        return version in self._tables

    @contextmanager
    def at(self, version: int) -> Iterator[Table]:
        """Its table."""
        yield self._tables[version]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Log-probs [R] of one turn, named as in ALGORITHMS 0; `lt` is None where no teacher scored it,
    `lk` that of the weights that sampled. `gap` is its age in versions, `traits` what else its
    sample has.
    """

    prompt: str
    l: Sequence[float]  # noqa: E741
    lo: Sequence[float]
    lt: Sequence[float] | None
    mu: Sequence[float]
    lf: Sequence[float] | None = None
    lk: Sequence[float] | None = None
    gap: int = 0
    traits: Mapping[str, Any]


class Run:
    """What a run's updater makes of some turns under `settings` of `[trainer]`."""

    def __init__(self, turns: Sequence[Turn], settings: Mapping[str, Any], *, step: int = 0):
        prompts = {name: place for place, name in enumerate(sorted({one.prompt for one in turns}))}
        self._ends = np.cumsum([len(prompts), *(len(one.lo) for one in turns)])
        self.samples = [
            self._sample(turn, prompts[turn.prompt], place) for place, turn in enumerate(turns)
        ]
        policy = self._table([one.lo for one in turns])
        starts = [one.lf for one in turns if one.lf is not None]
        self.updater = Updater(
            policy,  # type: ignore[arg-type]
            self._table(starts) if starts else None,
            TrainerConfig.model_validate(
                {
                    "beta_kl": 0.0,
                    "micro_batch_tokens": MICRO_BATCH_TOKENS,
                    # Several, so that later passes compare with the student before the first.
                    "epochs_per_batch": 2,
                    **settings,
                }
            ),
            older=self._older(turns),
        )
        gaps = [one.gap for one in turns]
        prepared = self.updater.preparation.prepare(self.samples, gaps, step=step)
        first: dict[int, TurnScores] = {}
        self.updater.accumulate(prepared, first)
        self.prepared: PreparedBatch = prepared.repeated(first)
        # From here on the policy has moved.
        policy.values.data = self._table([one.l for one in turns]).values.data
        self._policy = policy

    def gradients(self) -> tuple[BatchTotals, list[Tensor]]:
        """What the batch reports, and the gradient of each token's log-prob [R]."""
        totals = self.updater.accumulate(self.prepared)
        grad = self._policy.values.grad
        assert grad is not None
        return totals, self._by_turn(grad)

    def metrics(self) -> dict[str, float]:
        """Of rewards and lengths."""
        return self.prepared.reward_metrics

    def reward_advantages(self) -> list[float]:
        """Each turn's, which all of its tokens have."""
        found = []
        for view in self.prepared.views:
            (value,) = set(view.reward_advantage.tolist())
            found.append(value)
        return found

    def correction_metrics(self) -> dict[str, float]:
        """Of rollout correction, over the whole batch."""
        totals, _ = self.gradients()
        correction = Correction(self.updater.config.correction.settings())
        return correction.report(totals.rows).metrics

    def _by_turn(self, values: Tensor) -> list[Tensor]:
        bounds = zip(self._ends[:-1], self._ends[1:], strict=True)
        return [values[start:end] for start, end in bounds]

    def _table(self, rows: Sequence[Sequence[float]]) -> Table:
        """Of the tokens of every turn, after those of the prompts."""
        return Table([-1.0] * int(self._ends[0]) + [value for row in rows for value in row])

    def _older(self, turns: Sequence[Turn]) -> Older | None:
        known = [one.lk for one in turns if one.lk is not None]
        if not known:
            return None
        nobody = float("nan")
        return Older(
            {
                NEWEST - gap: self._table(
                    [
                        row if turn.gap == gap else [nobody] * len(row)
                        for turn, row in zip(turns, known, strict=True)
                    ]
                )
                for gap in {one.gap for one in turns}
            }
        )

    def _sample(self, turn: Turn, prompt: int, place: int) -> ReadySample:
        start, end = int(self._ends[place]), int(self._ends[place + 1])
        made = sample(
            np.array([prompt], dtype=np.int32),
            np.arange(start, end, dtype=np.int32),
            turn_id=f"turn {place}",
            session_id=f"session {place}",
            version=NEWEST - turn.gap,
        )
        span = VersionSpan(version=NEWEST - turn.gap, start=0, end=end - start)
        nobody = [float("nan")] * (end - start)
        return replace(
            made,
            version_spans=(span,),
            rollout_logprobs=np.array(turn.mu, dtype=np.float32),
            teacher_logprobs=np.array(nobody if turn.lt is None else turn.lt, dtype=np.float32),
            scope="test",
            **turn.traits,
        )


ANCHOR_ANSWERS = 8


def past_answers(
    past: Sequence[Mapping[str, Any]], prompt: str, anchor: float | None = None
) -> PromptHistory:
    """Those of a case's earlier answers that are to `prompt`; with an `anchor`, first ones of this
    mean length that all passed.
    """
    recent = tuple(
        PastAnswer(
            turn_id=f"past {place}", version=0, reward=one["reward"], length=one.get("length", 1)
        )
        for place, one in enumerate(past)
        if one["prompt"] == prompt
    )
    if anchor is None:
        return PromptHistory(recent=recent)
    short, longer = divmod(round(anchor * ANCHOR_ANSWERS), ANCHOR_ANSWERS)
    lengths = [short + (place < longer) for place in range(ANCHOR_ANSWERS)]
    return replace(first_answers([(1, length) for length in lengths]), recent=recent)


def first_answers(answers: Sequence[tuple[int, int]]) -> PromptHistory:
    """(whether it is right, its length) of each, oldest first."""
    return PromptHistory(
        first=tuple(
            PastAnswer(turn_id=f"first {place}", version=0, reward=float(right), length=length)
            for place, (right, length) in enumerate(answers)
        )
    )
