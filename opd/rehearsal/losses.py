"""Which open wishes the policy is losing, text by text, as its counter-lessons show.

Learning spreads unevenly: of six texts for the same wish, one may lose a fifth of its answers while
the others lose none, and if the texts take turns, it gets only a sixth of the lessons.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from records.types import Logprobs

_KEPT = 0.5
"""Weight of a text's older losses when another answer to it has been read."""
_NOTHING = 0.1
"""Nats per answer: how far policy and teacher differ if nothing is lost."""
_MOST = 4096
"""Texts that are remembered: those of ended hints drop out with time."""


class TextLosses:
    """What answers to each text (prompt id) have lost lately: the mean of sum_t |log pi - log q|
    over an answer's tokens, in nats, newer answers counting more. Only this process's answers
    count: a new process takes the texts in turn until it has read some.
    """

    def __init__(self) -> None:
        self._losses: OrderedDict[str, float] = OrderedDict()

    def add(self, prompt_id: str, policy: Logprobs, teacher: Logprobs) -> None:
        """One answer: its tokens' log-probs [R] by the policy that sampled it and by the start.
        Raises ValueError if they differ in number or are not finite.
        """
        if policy.shape != teacher.shape:
            raise ValueError(
                f"{len(policy)} log-probs of the policy, {len(teacher)} of the teacher"
            )
        loss = float(np.abs(policy.astype(np.float64) - teacher.astype(np.float64)).sum())
        if not math.isfinite(loss):
            raise ValueError(f"an answer to text {prompt_id} has log-probs that are not finite")
        if (before := self._losses.pop(prompt_id, None)) is not None:
            loss = _KEPT * before + (1.0 - _KEPT) * loss
        self._losses[prompt_id] = loss
        if len(self._losses) > _MOST:
            self._losses.popitem(last=False)

    def most_lost(self, prompt_ids: Sequence[str]) -> str | None:
        """The text that loses most; None if none loses anything."""
        lost = {one: self._losses[one] for one in prompt_ids if one in self._losses}
        most = max(lost, key=lost.__getitem__, default=None)
        return most if most is not None and lost[most] > _NOTHING else None
