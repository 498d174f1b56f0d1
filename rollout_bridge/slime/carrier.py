"""What travels with a row of training data through slime, in addition to slime's own keys.

slime passes a fixed list of keys from its rollout process to its trainer. Everything else that an
objective needs of a turn (the place of its tokens in the row, the teacher's scores, reward,
temperature, version gap) travels as one object per row: the convert hook puts it under the key
`prompt`, the advantage hook takes it out again. Arrays are shared with the samples, never copied.

It knows neither slime nor torch. Shapes: T tokens of a row; R = T - P of them are its response, P
the prompt of its first turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from records.types import (
    NO_HISTORY,
    UNKNOWN_OUTCOME,
    Experts,
    Logprobs,
    PromptHistory,
    ReadySample,
    SessionOutcome,
)
from rollout_bridge.merging import PackedSequence, TurnSpan
from rollout_bridge.rehearsal.kinds import LIVE, kind_of

CALIBRATION_BOUND = 0.1
"""Nats, for the mean over all probes. In bfloat16, two implementations differ by 0.01 to 0.05."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTraits:
    """The traits by which turns are compared; every trainer rank has those of the whole batch.

    `prompt_key` is equal for equal prompts of one scope, `num_tokens` are the response's; `kind` is
    `live`, or that of a lesson.
    """

    turn_id: str
    reward: float | None
    step_index: int
    prompt_key: bytes
    num_tokens: int
    is_cut: bool = False
    history: PromptHistory = NO_HISTORY
    session_id: str = ""
    session: SessionOutcome = UNKNOWN_OUTCOME
    kind: str = LIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """A batch: its turns, rows with turns, policy tokens, turns that an engine scored, and its
    epochs: how many steps are taken on it. `rate` is the factor of their learning rate, `step`
    counts the batches before this one.
    `calibration_bound` (nats): some of its rows are probes that engines scored; None: it has none.
    """

    turns: tuple[TurnTraits, ...]
    num_rows: int
    num_tokens: int
    num_taught: int
    epochs: int = 1
    rate: float = 1.0
    step: int = 0
    calibration_bound: float | None = None

    def without_histories(self) -> BatchFacts:
        """Small enough to be sent to every rank."""
        turns = tuple(
            replace(one, history=NO_HISTORY, session=replace(one.session, past=()))
            for one in self.turns
        )
        return replace(self, turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedTurn:
    """One turn: its place among `BatchFacts.turns`, tokens [start, end) of the row, its sample.

    The sample has only the teaching of the selected hint, and no routed experts: slime has its own
    key for them.
    """

    index: int
    start: int
    end: int
    version_gap: int
    sample: ReadySample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCarrier:
    """One row of slime's training data; `num_tokens` is T. A row without turns fills up a step, or
    is a probe with an engine's log-probs [T - 1] of all tokens but the first.
    """

    turns: tuple[CarriedTurn, ...]
    num_tokens: int
    batch: BatchFacts
    probe: Logprobs | None = None

    @property
    def prompt_length(self) -> int:
        """P: the tokens before the first one that trains; of a row without turns all but the last,
        of a probe the first.
        """
        if self.turns:
            return self.turns[0].start
        return self.num_tokens - 1 if self.probe is None else 1

    @property
    def response_length(self) -> int:
        """R: everything after them, policy tokens or not."""
        return self.num_tokens - self.prompt_length

    def loss_mask(self) -> list[int]:
        """[R]: 1 at policy tokens."""
        mask = np.zeros(self.response_length, dtype=np.int64)
        for turn in self.turns:
            mask[turn.start - self.prompt_length : turn.end - self.prompt_length] = 1
        return mask.tolist()

    def rollout_logprobs(self) -> Logprobs:
        """[R] float32 as the engine reported them.

        Where the mask is 0, nothing was sampled; slime needs a number there and multiplies it by 0.
        """
        values = np.zeros(self.response_length, dtype=np.float32)
        for turn in self.turns:
            start, end = turn.start - self.prompt_length, turn.end - self.prompt_length
            values[start:end] = turn.sample.rollout_logprobs
        return values


def build(
    samples: Sequence[ReadySample],
    rows: Sequence[PackedSequence],
    version_gaps: Sequence[int],
    epochs: int = 1,
    rate: float = 1.0,
    step: int = 0,
) -> list[RowCarrier]:
    """A carrier for each of `rows`, which together contain every sample of a batch once; rows
    without spans are allowed. `epochs` steps are taken on the batch; one if it has no samples;
    `rate` is the factor of their learning rate, `step` counts the batches before this one.

    `version_gaps` are updates between the sampling of each sample and this batch. Raises ValueError
    for a sample that is missing, duplicated, or whose tokens are not those of its span.
    """
    placed = sorted(span.turn for row in rows for span in row.spans)
    if placed != list(range(len(samples))) or len(version_gaps) != len(samples):
        raise ValueError(
            f"rows contain the samples {placed} and there are {len(version_gaps)} version gaps; "
            f"each of the {len(samples)} samples must occur once, with one gap"
        )
    batch = BatchFacts(
        turns=tuple(_facts(sample) for sample in samples),
        num_rows=sum(bool(row.spans) for row in rows),
        num_tokens=sum(len(sample.response_ids) for sample in samples),
        num_taught=sum(bool(np.isfinite(sample.teacher_logprobs).all()) for sample in samples),
        # Each step without turns would let Adam's momentum move the weights once more.
        epochs=epochs if samples else 1,
        rate=rate,
        step=step,
    )
    return [
        RowCarrier(
            turns=tuple(
                _carried(samples[span.turn], span, row, version_gaps[span.turn])
                for span in row.spans
            ),
            num_tokens=len(row.ids),
            batch=batch,
        )
        for row in rows
    ]


def row_experts(samples: Sequence[ReadySample], row: PackedSequence) -> Experts | None:
    """The experts [T - 1, layers, topk] that a row's tokens were sent to; None if a turn has none.

    Context has the experts of the last turn, each response those of when it was sampled. Entry t
    belongs to input token t, after which token t + 1 was sampled.
    """
    found = [samples[span.turn].routed_experts for span in row.spans]
    if any(experts is None for experts in found):
        return None
    known: list[NDArray[np.int16 | np.int32]] = [one for one in found if one is not None]
    merged = known[-1].copy() if len(known) > 1 else known[-1]
    for span, experts in zip(row.spans[:-1], known[:-1], strict=True):
        if experts.shape[1:] != merged.shape[1:]:
            raise ValueError(
                f"turn {samples[span.turn].turn_id}: routed experts of {experts.shape[1:]} layers "
                f"and experts per token, next to {merged.shape[1:]}; one model serves a row"
            )
        merged[span.start - 1 : span.end - 1] = experts[span.start - 1 : span.end - 1]
    return merged


def _facts(sample: ReadySample) -> TurnTraits:
    return TurnTraits(
        turn_id=sample.turn_id,
        reward=sample.reward,
        step_index=sample.step_index,
        prompt_key=_prompt_key(sample),
        num_tokens=len(sample.response_ids),
        is_cut=sample.is_cut,
        history=sample.history,
        session_id=sample.session_id,
        session=sample.session,
        kind=kind_of(sample),
    )


def _prompt_key(sample: ReadySample) -> bytes:
    scope = hashlib.blake2b(sample.scope.encode(), digest_size=16).digest()
    return hashlib.blake2b(scope + sample.prompt_ids.tobytes(), digest_size=16).digest()


def _carried(
    sample: ReadySample, span: TurnSpan, row: PackedSequence, version_gap: int
) -> CarriedTurn:
    if not np.array_equal(row.ids[span.start : span.end], sample.response_ids):
        raise ValueError(
            f"turn {sample.turn_id}: tokens {span.start} to {span.end} of its row are not its "
            "response"
        )
    # Scores of other hints and routing would not be used.
    # The traits that turns are compared by travel once, in the facts of the batch.
    slim = replace(
        sample,
        teachings=sample.teachings[:1],
        routed_experts=None,
        history=NO_HISTORY,
        session=UNKNOWN_OUTCOME,
    )
    return CarriedTurn(
        index=span.turn, start=span.start, end=span.end, version_gap=version_gap, sample=slim
    )
