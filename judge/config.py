"""Settings of the judge: where it answers, how often it is asked, how patient its worker is."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from judge.votes.selection import SELECTIONS
from rollout_bridge.config import ClaimLoopConfig

RewardKind: TypeAlias = Literal["none", "verdict", "votes", "outcome"]


class JudgeConfig(BaseModel):
    """A judge behind any OpenAI-compatible server. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    base_url: str = Field(pattern=r"^https?://\S+$")
    """Base URL up to and including `/v1`."""
    model: str
    """Model name sent in each request and stored with each verdict."""
    api_key: SecretStr = SecretStr("none")
    """Bearer key; local servers ignore it. Never printed."""
    votes: int = Field(default=3, ge=1)
    """Votes for each turn (m)."""
    shared_prefill_wait_s: float = Field(default=30.0, ge=0)
    """Longest time that the other votes wait for the first vote's first token; from then on they
    find the prompt in the judge's cache. 0 asks for all votes at once.
    """
    temperature: float = Field(default=0.6, ge=0)
    """Sampling temperature of a vote; at 0 all votes of a turn are the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass of a vote."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest answer of a vote, reasoning included."""
    max_prompt_tokens: int = Field(default=24576, ge=256)
    """Longest judge prompt; the oldest middle messages of a longer one are left out. Set it to the
    judge's context length minus max_tokens.
    """
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further request fields, e.g. `{"chat_template_kwargs": {"enable_thinking": false}}`."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one whole call; each retry has its own."""
    retries: int = Field(default=2, ge=0)
    """Retries of one call on transport errors, 429 and 5xx before the turn is set aside."""
    retry_wait_s: float = Field(default=0.25, ge=0)
    """First wait between retries; doubles, with jitter. A Retry-After header overrides it."""
    retry_wait_max_s: float = Field(default=10.0, gt=0)
    """Longest wait inside a call; a longer Retry-After pauses the whole worker instead."""
    selection: str = "longest"
    """Hint selection strategy (judge/votes/selection.py)."""
    min_positive_votes: int = Field(default=1, ge=1)
    """Positive votes needed before a hint is taken. 1 is the published rule, under which one
    mistaken vote of m trains the policy; a majority (2 of 3) is recommended.
    """
    max_hint_chars: int = Field(default=1000, ge=11)
    """A longer hint is rejected as `too_long`."""
    max_copied_words: int = Field(default=12, ge=1)
    """A hint with a longer run of words from the next state is rejected as `copies_next_state`."""
    allow_new_values: bool = False
    """Allow hints to name numbers, identifiers and addresses that occur in the next state and
    nowhere before it, so that the assistant could not have known them (`new_value`).
    """
    max_candidates: int = Field(default=3, ge=1)
    """At most this many hints of a turn are kept and scored, if the selection gives several."""
    exception_texts: int = Field(default=12, ge=1)
    """How many open wishes for the opposite of a hint the judge is asked for; if few are usable, it
    is asked again. Every third is kept out of training. A third as many wishes about which the hint
    says nothing are asked for.
    """
    reward: RewardKind = "none"
    """Reward of a turn: the majority of its votes, 1, 0 or -1 (`verdict`), their mean (`votes`),
    its session's outcome, whatever the votes say (`outcome`, docs/outcomes.md), or none. With a
    reward, turns without a hint train too.
    """
    review: Literal["none", "sampled", "all"] = "none"
    """Which accepted hints wait for a person, who approves, edits or rejects them at /ui/review,
    before anything trains on them.
    """
    review_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the accepted hints that wait under `review = "sampled"`, drawn by the turn's id."""
    recorded_votes_only: bool = False
    """Turns of a recording that came without votes are dropped (`no_recorded_votes`) and not shown
    to the judge.
    """
    loop: ClaimLoopConfig = ClaimLoopConfig()
    """Turns in flight, polling, and patience with a judge that is down."""

    @field_validator("selection")
    @classmethod
    def _selection_is_known(cls, value: str) -> str:
        if value not in SELECTIONS:
            raise ValueError(
                f"unknown selection {value!r}; choose one of {', '.join(sorted(SELECTIONS))}"
            )
        return value

    @model_validator(mode="after")
    def _votes_can_reach_the_minimum(self) -> JudgeConfig:
        if self.min_positive_votes > self.votes:
            raise ValueError(
                f"min_positive_votes {self.min_positive_votes} can never be reached "
                f"with {self.votes} votes"
            )
        return self
