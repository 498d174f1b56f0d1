"""A request's sampling fields as the engine's parameters, with OpenAI's defaults."""

from __future__ import annotations

from api_proxy.errors import context_length_exceeded, invalid
from api_proxy.request.completion import Completion
from rollout_bridge.engine.types import Grammar, SamplingParams


def reply_budget(
    requested: int | None,
    default: int | None,
    num_prompt_tokens: int,
    context_length: int | None,
) -> int:
    """Tokens that may be sampled: what was asked for, at most what the context leaves.

    Raises ApiError 400 `context_length_exceeded` if it leaves nothing. Without a known context
    length, it is left to the engine to refuse.
    """
    budget = requested if requested is not None else default
    if context_length is None:
        return budget if budget is not None else _UNKNOWN_CONTEXT_BUDGET
    left = context_length - num_prompt_tokens
    if left < 1:
        raise context_length_exceeded(num_prompt_tokens, context_length)
    return left if budget is None else min(budget, left)


_UNKNOWN_CONTEXT_BUDGET = 2048


def sampling_params(
    completion: Completion,
    budget: int,
    stop_token_ids: tuple[int, ...],
    grammar: Grammar | None,
    vocab_size: int,
) -> SamplingParams:
    """The engine's parameters; unset fields mean the plain softmax at temperature 1.

    Raises ApiError 400 for a bias on an id outside the vocabulary.
    """
    fields = completion.fields
    bias = fields.logit_bias or {}
    if any(not 0 <= token < vocab_size for token in bias):
        raise invalid(f"'logit_bias' names ids outside [0, {vocab_size}).", "logit_bias")
    return SamplingParams(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=-1 if fields.top_k in (None, 0) else fields.top_k,
        min_p=0.0 if fields.min_p is None else fields.min_p,
        max_new_tokens=budget,
        stop=completion.stop,
        stop_token_ids=stop_token_ids,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        min_new_tokens=min(fields.min_tokens or 0, budget),
        seed=fields.seed,
        logit_bias=tuple(bias.items()),
        grammar=grammar,
        top_logprobs=fields.top_logprobs or 0,
    )
