"""One request inside the embedded engine: what was asked, and what has been produced so far.

The scheduler thread writes, the HTTP thread reads: lists only grow, a log-probability is appended
after its id, and `finish` is set last.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from rollout_bridge.embedded.model.adapters import Adapter
from rollout_bridge.embedded.model.grammar import Kind, Matcher
from rollout_bridge.engine.types import SPARE_PRIORITY

_EXPECTED_RESPONSE = 256
"""Response tokens to reserve room for when a request is admitted. If requests outgrow the memory,
they are put back into the queue, newest first.
"""

TopLogprobs = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one request; neutral values leave the model's distribution as it is."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Every id that ends the response, the model's own included unless ignored."""
    seed: int | None = None
    grammar: tuple[Kind, str] | None = None
    skip_special_tokens: bool = True

    @property
    def truncates(self) -> bool:
        """Some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def adjusts(self) -> bool:
        """Logits depend on what this request said before, or are biased."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.min_new_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request ended; `matched` is the stop token id or stop string."""

    kind: str
    matched: int | str | None = None
    message: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """A request and its state. `score_from`: log-probs are wanted for `input_ids[score_from:]`.

    Requests of one `adapter` (None: the base) share the prefixes of one `cache_namespace`. Those of
    a higher `priority` start first; one below 0 is background work.
    """

    input_ids: list[int]
    sampling: Sampling
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    score_from: int | None = None
    num_top: int = 0
    token_ids: tuple[int, ...] = ()
    stream: bool = False
    cache_namespace: str = ""
    priority: int = 0
    adapter: Adapter | None = None

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[TopLogprobs] = field(default_factory=list)
    output_chosen: list[list[float]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top: list[TopLogprobs] = field(default_factory=list)
    input_chosen: list[list[float]] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, first output token sampled under it)."""
    cached_tokens: int = 0
    num_retractions: int = 0
    kv_is_current: bool = True
    """False if some keys and values were computed with older weights."""
    matcher: Matcher | None = None
    """The reply's place in its grammar, if it has one; it has taken all of `output_ids`."""
    finish: Finish | None = None
    error: str | None = None
    """Set when the engine itself failed; the request then has no result."""
    context: Any = None
    """For whoever made the request (the event that wakes its HTTP handler)."""

    def append(self, token_id: int, logprob: float, version: str) -> None:
        """One more sampled token."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output_ids)))
        self.output_ids.append(token_id)
        self.output_logprobs.append(logprob)

    def grammar_ends(self, token_id: int) -> Finish | None:
        """Tell the grammar, if there is one, what was sampled; returns the request's end if the
        grammar can go no further.

        Not called for the token that ends the reply: after a stop token there is nothing to match.
        """
        problem = None if self.matcher is None else self.matcher.take(token_id)
        if problem is None:
            return None
        self.error = f"the grammar cannot be followed: {problem}"
        return Finish(kind="abort", message=self.error)

    def forget_scores(self) -> None:
        """Discard input log-probs: they are computed again or not needed, and a part misleads."""
        self.input_logprobs = []
        self.input_top = []
        self.input_chosen = []

    @property
    def is_background(self) -> bool:
        """Whether no agent waits for it."""
        return self.priority < 0

    @property
    def is_spare(self) -> bool:
        """Whether it is only for rows that nothing else uses."""
        return self.priority <= SPARE_PRIORITY

    @property
    def prefix_namespace(self) -> str:
        """Where its prefixes are kept: keys and values belong to one adapter, whose name is never
        reused.
        """
        if self.adapter is None:
            return self.cache_namespace
        return f"{self.adapter.name}\n{self.cache_namespace}"

    @property
    def num_tokens(self) -> int:
        """Prompt and response so far."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def sequence(self) -> list[int]:
        """Ids of prompt and response so far (not to be changed)."""
        return self.input_ids + self.output_ids if self.output_ids else self.input_ids

    @property
    def scored_context(self) -> list[int]:
        """Ids before the first token whose log-prob is wanted, without the one that predicts it."""
        return self.input_ids[: (self.score_from or 1) - 1]

    @property
    def last_token(self) -> int:
        """The newest id: the one whose successor is sampled next."""
        return self.output_ids[-1] if self.output_ids else self.input_ids[-1]

    @property
    def expected_length(self) -> int:
        """Tokens that there should be memory for when it starts."""
        left = self.sampling.max_new_tokens - len(self.output_ids)
        return self.num_tokens + min(left, _EXPECTED_RESPONSE)
