"""What is asked of an engine and what it answers, as plain values.

Lengths are checked on construction: a generation has exactly one log-probability per sampled token,
and its weight spans, if known, cover the tokens without gap or overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from records.types import Experts, Ids, Logprobs

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["retract", "abort", "in_place"]
TopLogprobs = tuple[tuple[int, float], ...]
"""(id, log-prob at the sampling temperature) of the most probable tokens at one position."""

AGENT_PRIORITY = 0
BACKGROUND_PRIORITY, FIRST_PRIORITY, SPARE_PRIORITY = -1, 1, -2
"""Priorities of requests that no agent waits for: judge and teacher; calibration and rehearsal,
whose few requests start first; more of rehearsal, for rows that nothing else uses.
"""
ROUTING_HEADER = "X-SMG-Routing-Key"
"""Header by which SGLang's router, with its policy `manual` or `consistent_hashing`, keeps requests
of one key on one server, where their common prefix is cached.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What a reply must be: the JSON text of a schema, or of a structural tag in xgrammar's format
    (which may name single tokens by id).
    """

    kind: Literal["json_schema", "structural_tag"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample; the defaults are the model's full distribution at temperature 1.

    `top_k` <= 0 keeps every token. `max_new_tokens` counts sampled tokens, stop token included;
    before `min_new_tokens` no stop token is sampled.
    `logit_bias` is (id, what is added to its logit). Under a `grammar` only tokens that continue it
    are sampled. `top_logprobs` alternatives are reported with each token; they change nothing.
    `seed`: the same prompt gives the same tokens again, on engines that honour it (SGLang: started
    with --enable-deterministic-inference).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")

    def distribution_modified(self) -> str | None:
        """Why recorded log-probs are not those of the distribution sampled from, or None.

        Temperature alone is corrected for (log-probs are recorded at the sampling temperature);
        greedy decoding, truncation and penalties cannot be. Of several reasons, the one that makes
        log-probs least comparable is named first: next to a penalty, truncation is harmless.
        """
        if self.temperature == 0:
            return "temperature_0"
        if self.grammar is not None:
            return "grammar"
        if self.logit_bias:
            return "logit_bias"
        if self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1:
            return "penalty"
        if self.min_new_tokens:
            return "min_tokens"
        if self.top_p < 1:
            return "top_p"
        if self.top_k > 0:
            return "top_k"
        if self.min_p > 0:
            return "min_p"
        return None

    def to_wire(self) -> dict[str, Any]:
        """SGLang's `sampling_params`; neutral values are left out."""
        wire: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
        }
        if self.top_k > 0:
            wire["top_k"] = self.top_k
        if self.min_p > 0:
            wire["min_p"] = self.min_p
        if self.frequency_penalty:
            wire["frequency_penalty"] = self.frequency_penalty
        if self.presence_penalty:
            wire["presence_penalty"] = self.presence_penalty
        if self.repetition_penalty != 1:
            wire["repetition_penalty"] = self.repetition_penalty
        if self.min_new_tokens:
            wire["min_new_tokens"] = self.min_new_tokens
        if self.ignore_eos:
            wire["ignore_eos"] = True
        if self.stop:
            wire["stop"] = list(self.stop)
        if self.stop_token_ids:
            wire["stop_token_ids"] = list(self.stop_token_ids)
        if self.seed is not None:
            wire["sampling_seed"] = self.seed
        if self.logit_bias:
            wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        if self.grammar is not None:
            wire[self.grammar.kind] = self.grammar.text
        return wire


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Output tokens [start, end) were sampled with the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished generation.

    `output_ids` [R] int32, the stop token included; `output_logprobs` [R] float32 natural logs at
    the sampling temperature; `text` is trimmed at the stop. `matched` is the stop token id or stop
    string. `weight_spans` is None if the engine does not report them, and so is
    `routed_experts` [prompt + R - 1, layers, topk]. `top` [R] as in `GenerationChunk`.
    """

    output_ids: Ids
    output_logprobs: Logprobs
    text: str
    finish_reason: FinishReason
    matched: int | str | None
    weight_version: str | None
    weight_spans: tuple[WeightSpan, ...] | None
    prompt_tokens: int
    cached_tokens: int
    routed_experts: Experts | None = None
    top: tuple[TopLogprobs, ...] = ()

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.output_logprobs):
            raise ValueError(
                f"{len(self.output_ids)} output ids but {len(self.output_logprobs)} log-probs"
            )
        if not np.isfinite(self.output_logprobs).all():
            raise ValueError("an output log-prob is not finite")
        if self.weight_spans is not None:
            _check_spans(self.weight_spans, len(self.output_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """Tokens that arrived since the chunk before; `final` is set on the last chunk only.

    `new_top`: for each of them the most probable tokens, if they were asked for, else ().
    """

    new_ids: tuple[int, ...]
    new_logprobs: tuple[float, ...]
    new_top: tuple[TopLogprobs, ...] = ()
    final: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Log-probs [R] at temperature 1 of given tokens; ids and log-probs [R, k] of the k most
    probable ones at each position, if they were requested.
    """

    logprobs: Logprobs
    topk_ids: Ids | None = None
    topk_logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an engine serves now; None where it does not report it."""

    model_path: str
    weight_version: str
    vocab_size: int | None
    context_length: int | None


def _check_spans(spans: tuple[WeightSpan, ...], length: int) -> None:
    expected = 0
    for span in spans:
        if span.start != expected or span.end < span.start:
            raise ValueError(f"weight spans have a gap or an overlap at token {expected}: {spans}")
        expected = span.end
    if expected != length:
        raise ValueError(f"weight spans cover {expected} of {length} output tokens")
