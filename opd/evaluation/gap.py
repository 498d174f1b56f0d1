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
from rollout_bridge.bootstrap import Estimate, mean_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedCase:
    """A response [R] with the prompt it answers and that prompt with the hint. The responses of one
    `session` are resampled together.
    """

    session: str
    prompt_ids: Ids
    hinted_prompt_ids: Ids
    response_ids: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseGap:
    """KL(student || teacher) and KL(teacher || student) in nats, each summed over the `num_tokens`
    tokens of one response.
    """

    session: str
    reverse: float
    forward: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Means over `num_tokens` tokens, in nats: KL(student || teacher), KL(teacher || student).

    `low` and `high` are the 95% interval of the first, over sessions; None with fewer than two.
    """

    reverse_kl: float
    forward_kl: float
    num_tokens: int
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GapChange:
    """By how much the reverse KL per token rose, in nats, with its 95% interval over sessions. The
    responses are the same before and after, so that their differences from each other do not widen
    it, as they widen the interval of each gap.
    """

    value: float
    low: float | None
    high: float | None


def measure_gap(
    student: str,
    teacher: str,
    cases: Sequence[HintedCase],
    *,
    device: str = "cpu",
    on_case: Callable[[], None] = lambda: None,
) -> list[CaseGap]:
    """The gap of each case between two folders of weights (or hub ids).

    Cases whose prompts begin alike should follow each other: what they share is computed once.
    `on_case` is called after each case; what it raises ends the measurement.
    """
    own = PrefixScorer(student, device)
    other = PrefixScorer(teacher, device)
    found = []
    for case in cases:
        p = own.log_probs(case.prompt_ids, case.response_ids)
        q = other.log_probs(case.hinted_prompt_ids, case.response_ids)
        found.append(
            CaseGap(
                session=case.session,
                reverse=float((p.exp() * (p - q)).sum()),
                forward=float((q.exp() * (q - p)).sum()),
                num_tokens=len(case.response_ids),
            )
        )
        on_case()
    return found


def gap_of(cases: Sequence[CaseGap]) -> Gap:
    """The mean over the tokens of all cases. Raises ValueError without cases."""
    reverse = _per_token(cases, [one.reverse for one in cases])
    num_tokens = sum(one.num_tokens for one in cases)
    interval = reverse.interval
    return Gap(
        reverse_kl=reverse.value,
        forward_kl=sum(one.forward for one in cases) / num_tokens,
        num_tokens=num_tokens,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
    )


def change_of(before: Sequence[CaseGap], after: Sequence[CaseGap]) -> GapChange:
    """From one measurement of some cases to another one of the same. Raises ValueError for others,
    or without cases.
    """
    shapes = [[(one.session, one.num_tokens) for one in cases] for cases in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError("the two gaps were not measured on the same responses")
    rises = [new.reverse - old.reverse for old, new in zip(before, after, strict=True)]
    found = _per_token(before, rises)
    interval = found.interval
    return GapChange(
        value=found.value,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
    )


def _per_token(cases: Sequence[CaseGap], sums: Sequence[float]) -> Estimate:
    """The mean over the tokens of all cases, of which each has a sum."""
    values, sessions = [], []
    for case, total in zip(cases, sums, strict=True):
        values += [total / case.num_tokens] * case.num_tokens
        sessions += [case.session] * case.num_tokens
    return mean_estimate(values, sessions, seed=0)


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
