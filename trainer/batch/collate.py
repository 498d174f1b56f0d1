"""Merged sequences (`rollout_bridge.merging`) -> micro-batches of tensors -> scores, turn by turn.

Context between the turns of a sequence is mask 0. Scores are those of whole batches without
gradients: the policy before a step, a teacher. A row of a batch may contain several turns, and a
turn's hinted prompt is not the sequence that it was sampled in, so everything is split into one
record per turn. The objective's batch is put together from these again (`MicroBatch.spread`).
Losses and the store are unknown here.

Shapes: T tokens of a sequence; B rows, T padded tokens of a micro-batch; R tokens of a turn's
response, K tokens per position. Element t of every array is about token t; the logit row t-1 scores
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from records.types import Ids, ReadySample
from rollout_bridge.merging import PackedSequence, TurnSpan
from trainer.model.token_states import LogprobModel, TokenLogprobs, TokenRequest, shared_length

_MOST_COPIES = 4
"""The rows of a group may have keys and values of this many times `max_tokens`."""
_BEGINNING = 64
"""Sequences that share this many first tokens begin with the same system prompt."""
# With a truncated distribution the reported log-probs are still those of the full one; with other
# changes (penalties, temperature 0, biases) no forward pass can be compared with them.
COMPARABLE_MODIFICATIONS = frozenset({"top_p", "top_k", "min_p"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of some sequences, padded on the right; all [B, T] except `sequences`.

    Padding needs no attention mask: attention is causal, and no real token is to its right.
    `temperatures_BT` is 1 outside the mask, `turn_ids_BT` is -1.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    turn_ids_BT: Tensor
    temperatures_BT: Tensor
    sequences: tuple[PackedSequence, ...]
    num_shared: int = 0
    """Leading tokens of all rows that go through the model once."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return self.ids_BT.numel() - self.num_shared * (len(self.ids_BT) - 1)

    def spread(self, turns: Sequence[Tensor], *, fill: float) -> Tensor:
        """Per-turn values [R] or [R, K] (indexed as the batch's samples) at their tokens' places:
        [B, T] or [B, T, K], `fill` elsewhere.
        """
        first = turns[self.sequences[0].spans[0].turn]
        shape = (*self.ids_BT.shape, *first.shape[1:])
        result = torch.full(shape, fill, dtype=first.dtype, device=self.ids_BT.device)
        for row, sequence in enumerate(self.sequences):
            for span in sequence.spans:
                result[row, span.start : span.end] = turns[span.turn]
        return result

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """The inverse: [R] or [R, K] of each turn in this micro-batch, from [B, T] or [B, T, K]."""
        return {
            span.turn: values[row, span.start : span.end]
            for row, sequence in enumerate(self.sequences)
            for span in sequence.spans
        }


def micro_batches(
    samples: Sequence[ReadySample],
    sequences: Sequence[PackedSequence],
    max_tokens: int,
    device: torch.device | str,
    *,
    at_temperature: bool = True,
    groups_alike: bool = False,
    shares: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of `sequences`, whose spans name places in `samples`, at each sample's own
    temperature (1 where nothing can be compared there, and everywhere without `at_temperature`).

    `groups_alike`: sequences that begin alike are grouped, their beginning counted once; `shares`:
    the model computes it once.
    """
    temperatures = None
    if at_temperature:
        temperatures = [sample.temperature if comparable(sample) else 1.0 for sample in samples]
    return [
        build_micro_batch(group, device, temperatures, shares=shares)
        for group in plan_micro_batches(sequences, max_tokens, shares=groups_alike)
    ]


def plan_micro_batches(
    sequences: Sequence[PackedSequence], max_tokens: int, *, shares: bool = False
) -> list[list[PackedSequence]]:
    """Groups of at most `max_tokens` padded tokens, the longest first; a longer sequence gets its
    own group. With `shares`, sequences that begin alike are grouped, and the shared beginning
    counts once. Each row still has keys and values of it, so a group has at most four times
    `max_tokens` with it counted in each row.
    """
    groups: list[list[PackedSequence]] = []
    shared = longest = 0
    begin = Counter(map(_beginning, sequences))

    def place(one: PackedSequence) -> tuple[bytes, int]:
        beginning = _beginning(one)
        return (beginning if shares and begin[beginning] > 1 else b""), -len(one.ids)

    for sequence in sorted(sequences, key=place):
        if groups:
            common = min(shared, _shared(groups[-1][0], sequence)) if shares else 0
            most = max(longest, len(sequence.ids))
            padded = (len(groups[-1]) + 1) * most
            fits = padded - common * len(groups[-1]) <= max_tokens
            if fits and padded <= _MOST_COPIES * max_tokens:
                groups[-1].append(sequence)
                shared, longest = common, most
                continue
        groups.append([sequence])
        shared, longest = sequence.spans[0].start - 1, len(sequence.ids)
    return groups


def _beginning(sequence: PackedSequence) -> bytes:
    """Equal for sequences whose first tokens are equal: one agent's system prompt."""
    return sequence.ids[:_BEGINNING].tobytes()


def _shared(one: PackedSequence, other: PackedSequence) -> int:
    """How many leading tokens both share, before the state that scores a trained token."""
    length = min(one.spans[0].start, other.spans[0].start) - 1
    differs = np.flatnonzero(one.ids[:length] != other.ids[:length])
    return int(differs[0]) if len(differs) else length


def build_micro_batch(
    sequences: Sequence[PackedSequence],
    device: torch.device | str = "cpu",
    temperatures: Sequence[float] | None = None,
    *,
    shares: bool = False,
) -> MicroBatch:
    """Tensors for `sequences`; `temperatures` of the turns that their spans name default to 1.
    `shares`: the model computes their shared beginning once.
    """
    shape = (len(sequences), max(len(sequence.ids) for sequence in sequences))
    ids = np.zeros(shape, dtype=np.int64)
    turn_ids = np.full(shape, -1, dtype=np.int64)
    scale = np.ones(shape, dtype=np.float32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.ids)] = sequence.ids
        for span in sequence.spans:
            turn_ids[row, span.start : span.end] = span.turn
            if temperatures is not None:
                scale[row, span.start : span.end] = temperatures[span.turn]
    ids_BT, mask_BT = torch.from_numpy(ids), torch.from_numpy((turn_ids >= 0).astype(np.float32))
    return MicroBatch(
        ids_BT=ids_BT.to(device),
        mask_BT=mask_BT.to(device),
        turn_ids_BT=torch.from_numpy(turn_ids).to(device),
        temperatures_BT=torch.from_numpy(scale).to(device),
        sequences=tuple(sequences),
        num_shared=shared_length(ids_BT, mask_BT) if shares else 0,
    )


def comparable(sample: ReadySample) -> bool:
    """Whether the rollout log-probs can be compared with a forward pass at the temperature.

    Where they cannot, the importance weight is 1 and the ratio is taken at temperature 1: nothing
    is ever divided by temperature 0.
    """
    modified = sample.distribution_modified
    return (modified is None or modified in COMPARABLE_MODIFICATIONS) and sample.temperature > 0


def pad_rows(turns: Sequence[Tensor], fill: float) -> Tensor:
    """[R] or [R, K] of each turn -> [S, Rmax] or [S, Rmax, K], one row per turn."""
    return torch.nn.utils.rnn.pad_sequence(list(turns), batch_first=True, padding_value=fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScores:
    """One turn's detached log-probs [R], and what else was asked for [R, K]."""

    logprobs: Tensor
    logprobs_sampled: Tensor
    support: Tensor | None = None
    topk_ids: Tensor | None = None
    topk: Tensor | None = None
    drawn_ids: Tensor | None = None
    drawn: Tensor | None = None


def split_turns(scores: TokenLogprobs, batch: MicroBatch) -> dict[int, TurnScores]:
    """The scores of a micro-batch by turn."""
    fields = {
        "logprobs": scores.logprobs_BT,
        "logprobs_sampled": scores.logprobs_sampled_BT,
        "support": scores.support_BTK,
        "topk_ids": scores.topk_ids_BTK,
        "topk": scores.topk_BTK,
        "drawn_ids": scores.drawn_ids_BTK,
        "drawn": scores.drawn_BTK,
    }
    columns = {
        name: batch.gather(values.detach()) for name, values in fields.items() if values is not None
    }
    return {
        turn: TurnScores(**{name: values[turn] for name, values in columns.items()})
        for turn in columns["logprobs"]
    }


def token_requests(
    batches: Sequence[MicroBatch],
    support_ids: Sequence[Tensor] | None,
    *,
    top_k: int = 0,
    entropy_gradient: bool = False,
    draw: int = 0,
    generator: torch.Generator | None = None,
) -> list[TokenRequest]:
    """What each micro-batch asks a model for; `support_ids` [R, K] of each turn."""
    return [
        TokenRequest(
            support_ids_BTK=None if support_ids is None else batch.spread(support_ids, fill=0),
            top_k=top_k,
            entropy_gradient=entropy_gradient,
            draw=draw,
            generator=generator,
        )
        for batch in batches
    ]


@torch.no_grad()
def score_batches(
    model: LogprobModel,
    batches: Sequence[MicroBatch],
    *,
    support_ids: Sequence[Tensor] | None = None,
    top_k: int = 0,
    draw: int = 0,
    generator: torch.Generator | None = None,
) -> list[TurnScores]:
    """Scores of every turn of `batches`, in the order of the samples; `support_ids` [R, K] each."""
    found: dict[int, TurnScores] = {}
    requests = token_requests(batches, support_ids, top_k=top_k, draw=draw, generator=generator)
    for batch, request in zip(batches, requests, strict=True):
        scores = model.token_logprobs(batch.ids_BT, batch.mask_BT, batch.temperatures_BT, request)
        found |= split_turns(scores, batch)
    return [found[turn] for turn in range(len(found))]


def score_responses(
    model: LogprobModel,
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    *,
    max_tokens: int,
    device: torch.device | str,
    support_ids: Sequence[Tensor] | None = None,
    top_k: int = 0,
    draw: int = 0,
) -> list[TurnScores]:
    """Scores of each response after its own prompt, at temperature 1."""
    sequences = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = np.concatenate([prompt, response])
        span = TurnSpan(turn=index, start=len(prompt), end=len(ids))
        sequences.append(PackedSequence(ids=ids, spans=(span,)))
    groups = plan_micro_batches(sequences, max_tokens)
    batches = [build_micro_batch(group, device) for group in groups]
    return score_batches(model, batches, support_ids=support_ids, top_k=top_k, draw=draw)
