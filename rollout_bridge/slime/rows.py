"""The rows of a batch that slime trains on: merged turns, and padding if there are too few.

A row counts as its turns, because its carrier describes the batch. It knows no slime and no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from records.types import Experts, Ids, ReadySample
from rollout_bridge.merging import PackedSequence, merge_turns
from rollout_bridge.slime.carrier import RowCarrier, build, row_experts
from rollout_bridge.slime.probes import Probe

PADDING_IDS = 2
"""Tokens of a row without turns: one to predict from, one that is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """ids [T]; `experts` [T - 1, layers, topk] int32, or None in all rows of a batch."""

    ids: Ids
    carrier: RowCarrier
    experts: Experts | None

    @property
    def is_padding(self) -> bool:
        """Whether it contains neither a turn nor a probe."""
        return not self.carrier.turns and self.carrier.probe is None


def train_rows(
    samples: Sequence[ReadySample],
    version_gaps: Sequence[int],
    *,
    min_rows: int,
    epochs: int = 1,
    rate: float = 1.0,
    step: int = 0,
    experts_shape: tuple[int, int] | None = None,
    probes: Sequence[Probe] = (),
) -> list[TrainRow]:
    """Rows that together contain every sample once; a multiple of `min_rows` (1 if that is 0).

    Rows without turns come after the others, `probes` first. With `experts_shape` (layers, experts
    per token) every row has its routed experts. Raises ValueError for a sample without them, or of
    another shape.
    """
    sequences = merge_turns(samples)
    first_probe = len(sequences)
    sequences += [PackedSequence(ids=probe.ids, spans=()) for probe in probes]
    padding = PackedSequence(ids=np.zeros(PADDING_IDS, dtype=np.int32), spans=())
    # slime rounds the number of micro-batches up to such a multiple, and each needs a row.
    multiple = max(min_rows, 1)
    number = -(-max(len(sequences), 1) // multiple) * multiple
    sequences += [padding] * (number - len(sequences))
    carriers = build(samples, sequences, version_gaps, epochs, rate, step)
    if probes:
        facts = replace(carriers[0].batch, calibration_bound=probes[0].bound)
        carriers = [replace(carrier, batch=facts) for carrier in carriers]
    for place, probe in enumerate(probes, start=first_probe):
        carriers[place] = replace(carriers[place], probe=probe.logprobs)
    return [
        TrainRow(
            ids=sequence.ids,
            carrier=carrier,
            experts=None if experts_shape is None else _experts(samples, sequence, experts_shape),
        )
        for sequence, carrier in zip(sequences, carriers, strict=True)
    ]


def _experts(
    samples: Sequence[ReadySample], sequence: PackedSequence, shape: tuple[int, int]
) -> Experts:
    if not sequence.spans:
        # Any experts that differ from each other: nothing is learned from these tokens.
        one = np.arange(shape[1], dtype=np.int32)
        return np.tile(one, (len(sequence.ids) - 1, shape[0], 1))
    experts = row_experts(samples, sequence)
    if experts is None or experts.shape[1:] != shape:
        found = "none" if experts is None else str(experts.shape[1:])
        raise ValueError(
            f"turn {samples[sequence.spans[-1].turn].turn_id}: routed experts of {shape} layers "
            f"and experts per token are needed for the replay, {found} are recorded"
        )
    return experts.astype(np.int32, copy=False)
