"""How far a student is from its hinted teacher on given responses: the gap that distillation
closes.

At every token of a response the student's distribution under the prompt is compared with the
teacher's under the hinted prompt: exact KL over the whole vocabulary, both ways, averaged over
tokens. Runs in this process, from folders of weights; one response at a time, so that a large
vocabulary fits, and on a cache of the last prompt, because a session's prompts begin alike.

Shapes: R tokens of a response, V ids of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from records.types import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedCase:
    """A response [R] with the prompt it answers and that prompt with the hint."""

    prompt_ids: Ids
    hinted_prompt_ids: Ids
    response_ids: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Means over `num_tokens` tokens, in nats: KL(student || teacher), KL(teacher || student)."""

    reverse_kl: float
    forward_kl: float
    num_tokens: int


def measure_gap(
    student: str,
    teacher: str,
    cases: Sequence[HintedCase],
    *,
    device: str = "cpu",
    on_case: Callable[[], None] = lambda: None,
) -> Gap:
    """The gap between two folders of weights (or hub ids). Raises ValueError without cases.

    Cases whose prompts begin alike should follow each other: what they share is computed once.
    `on_case` is called after each case; what it raises ends the measurement.
    """
    if not cases:
        raise ValueError("the gap is a mean over responses: there are none")
    own = PrefixScorer(student, device)
    other = PrefixScorer(teacher, device)
    reverse, forward, num_tokens = 0.0, 0.0, 0
    for case in cases:
        p = own.log_probs(case.prompt_ids, case.response_ids)
        q = other.log_probs(case.hinted_prompt_ids, case.response_ids)
        reverse += float((p.exp() * (p - q)).sum())
        forward += float((q.exp() * (q - p)).sum())
        num_tokens += len(case.response_ids)
        on_case()
    return Gap(
        reverse_kl=reverse / num_tokens, forward_kl=forward / num_tokens, num_tokens=num_tokens
    )


class PrefixScorer:
    """A model in float32 that keeps keys and values of the ids it saw last."""

    def __init__(self, path: str, device: str) -> None:
        # A progress bar for each folder would break the command's own.
        transformers_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = model.to(device).eval()
        self._device = device
        self._ids = np.empty(0, dtype=np.int32)
        self._cache: Any = DynamicCache()

    @torch.no_grad()
    def log_probs(self, prompt_ids: Ids, response_ids: Ids) -> Tensor:
        """Log-probs [R, V] of every next token at the response's positions, temperature 1."""
        ids = np.concatenate([prompt_ids, response_ids[:-1]])
        # The last prompt token is computed again: its row scores the first response token.
        kept = min(_num_equal(self._ids, ids), len(prompt_ids) - 1)
        if surplus := len(self._ids) - kept:
            self._cache.crop(-surplus)
        new = torch.from_numpy(ids[kept:].astype(np.int64))[None].to(self._device)
        found = self._model(
            new,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=len(response_ids),
        )
        self._ids = ids
        return torch.log_softmax(found.logits[0].float(), dim=-1)


def _num_equal(first: Ids, second: Ids) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
