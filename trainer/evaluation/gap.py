"""How far a student is from its hinted teacher on given responses: what distillation is to close.

At every token of a response the student's distribution under the prompt is compared with the
teacher's under the hinted prompt: exact KL over the whole vocabulary, both ways, averaged over
tokens. Runs in this process, from folders of weights; one turn at a time, so that a large
vocabulary fits.

Shapes: R tokens of a response, V ids of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from records.types import Ids
from trainer.policy import Policy
from trainer.turn_scores import score_responses


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
    vocab_size: int,
    *,
    device: str = "cpu",
    max_tokens: int = 4096,
) -> Gap:
    """The gap between two folders of weights (or hub ids). Raises ValueError without cases."""
    if not cases:
        raise ValueError("the gap is a mean over responses: there are none")
    models = [
        Policy.load(path, device=device, dtype="float32", chunk_tokens=1024).freeze()
        for path in (student, teacher)
    ]
    everything = torch.arange(vocab_size)
    reverse, forward, num_tokens = 0.0, 0.0, 0
    for case in cases:
        support = [everything.expand(len(case.response_ids), -1)]
        own, other = (
            score_responses(
                model,
                [prompt],
                [case.response_ids],
                max_tokens=max_tokens,
                device=device,
                support_ids=support,
            )[0].support
            for model, prompt in zip(models, (case.prompt_ids, case.hinted_prompt_ids), strict=True)
        )
        assert own is not None
        assert other is not None
        reverse += float((own.exp() * (own - other)).sum())
        forward += float((other.exp() * (other - own)).sum())
        num_tokens += len(case.response_ids)
    return Gap(
        reverse_kl=reverse / num_tokens, forward_kl=forward / num_tokens, num_tokens=num_tokens
    )
