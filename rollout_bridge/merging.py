"""Turns whose tokens extend each other, as ONE sequence: what they repeat is stored once.

Whatever lies between the turns of a sequence (tool output, user text, template, turns that were
dropped) is context. The loss is the same as with a sequence per turn, because every token sees the
same prefix and weights are counted per turn. Every trainer uses this module. Pure functions of
numpy arrays; they know no tensors, models or store.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from records.types import Ids, ReadySample


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """Tokens [start, end) of a sequence are the response of sample `turn` (index in the batch)."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """One path of a conversation: `ids` [T] and the spans that train, in order."""

    ids: Ids
    spans: tuple[TurnSpan, ...]

    def __post_init__(self) -> None:
        position = 1
        for span in self.spans:
            if not position <= span.start < span.end <= len(self.ids):
                raise ValueError(f"span {span} does not fit a sequence of {len(self.ids)} tokens")
            position = span.end


def merge_turns(samples: Sequence[ReadySample]) -> list[PackedSequence]:
    """Sequences that together contain the response of every sample exactly once.

    A turn joins the longest sequence of its session whose ids its prompt starts with; siblings,
    duplicates and turns after a rewritten history start sequences of their own. They are in the
    order of their first turns.
    """
    by_length = sorted(
        range(len(samples)),
        key=lambda i: len(samples[i].prompt_ids) + len(samples[i].response_ids),
    )
    paths: dict[str, list[_Path]] = {}
    for index in by_length:
        sample = samples[index]
        session = paths.setdefault(sample.session_id, [])
        path = _longest_prefix(session, sample.prompt_ids)
        if path is None:
            path = _Path(ids=sample.prompt_ids[:0], spans=[])
            session.append(path)
        path.extend(index, sample)
    merged = [path.packed() for session in paths.values() for path in session]
    return sorted(merged, key=lambda sequence: min(span.turn for span in sequence.spans))


class _Path:
    """A sequence under construction."""

    def __init__(self, ids: Ids, spans: list[TurnSpan]):
        self.ids = ids
        self.spans = spans

    def extend(self, index: int, sample: ReadySample) -> None:
        start = len(sample.prompt_ids)
        self.ids = np.concatenate([sample.prompt_ids, sample.response_ids])
        self.spans.append(TurnSpan(turn=index, start=start, end=len(self.ids)))

    def packed(self) -> PackedSequence:
        return PackedSequence(ids=self.ids, spans=tuple(self.spans))


def _longest_prefix(paths: list[_Path], prompt_ids: Ids) -> _Path | None:
    best: _Path | None = None
    for path in paths:
        length = len(path.ids)
        if length > len(prompt_ids) or (best is not None and length <= len(best.ids)):
            continue
        if np.array_equal(path.ids, prompt_ids[:length]):
            best = path
    return best
