"""Which open wishes the policy is losing, text by text, as its counter-lessons show.

What is learned spreads unevenly: of six texts for the same wish one may lose a fifth of its answers
while the others lose none, and taught in turn it gets a sixth of the lessons.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from records.types import Logprobs

_KEPT = 0.5
"""Of the older losses of a text, when another answer to it was read."""
_NOTHING = 0.1
"""Nats an answer: what the policy and its teacher differ by where nothing is lost."""


class TextLosses:
    """What answers to each text (prompt id) have lost lately: the mean of sum_t |log pi - log q|
    over an answer's tokens, in nats, newer answers counting more. Of this process alone: a new one
    begins without.
    """

    def __init__(self) -> None:
        self._losses: dict[str, float] = {}

    def add(self, prompt_id: str, policy: Logprobs, teacher: Logprobs) -> None:
        """One answer: its tokens' log-probs [R] by the policy that sampled it and by the start."""
        found = np.abs(policy.astype(np.float64) - teacher.astype(np.float64))
        if not np.isfinite(found).all():
            return
        loss = float(found.sum())
        before = self._losses.get(prompt_id, loss)
        self._losses[prompt_id] = _KEPT * before + (1.0 - _KEPT) * loss

    def most_lost(self, prompt_ids: Sequence[str]) -> str | None:
        """The text that loses most; None where none loses anything."""
        known = [one for one in prompt_ids if self._losses.get(one, 0.0) > _NOTHING]
        return max(known, key=self._losses.__getitem__) if known else None
