"""The value types of the hint memory: a hint, where it came from, and the texts made from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HintStatus(StrEnum):
    """What becomes of a hint. Only `active` ones are rehearsed."""

    ACTIVE = "active"
    RESTING = "resting"
    """Learned: the gap on held-back states has closed. Wakes when it opens again."""
    STUCK = "stuck"
    """Rehearsed for as many steps as are allowed, and the gap has not closed."""
    CONTRADICTED = "contradicted"
    """A later hint of its scope says the opposite."""
    MERGED = "merged"
    """Another hint of its scope says the same, and has its sources now."""
    WITHDRAWN = "withdrawn"
    """Users objected to what it taught."""
    DELETED = "deleted"


LIVE_STATUSES = (HintStatus.ACTIVE, HintStatus.RESTING, HintStatus.STUCK)
"""Hints that still hold: a new one is compared with these."""
ENDED_STATUSES = (HintStatus.CONTRADICTED, HintStatus.WITHDRAWN, HintStatus.DELETED)
"""Hints that must not be learned any more; what a merged one taught still holds."""


class RehearsalBlock(StrEnum):
    """Why an active hint is not rehearsed. Its live turns still train."""

    NO_MAJORITY = "no_majority"
    """Fewer than half of the votes on its turn asked for a hint."""
    NOT_EXAMINED = "not_examined"
    """The judge never answered when it was asked about it."""
    NOT_A_RULE = "not_a_rule"
    """The judge says that it was meant for one answer only."""
    UNCONFIRMED = "unconfirmed"
    """Its user's words would not have changed the answer: another session has to ask for it."""
    NO_STATES = "no_states"
    """No recorded state to which it applies may be used."""
    NO_COUNTER_LESSONS = "no_counter_lessons"
    """No open wish for the opposite that the start model follows."""
    OTHER_SCOPE = "other_scope"
    """A hint of another scope says the opposite: somebody has to decide."""


class PromptKind(StrEnum):
    """The purpose of words that are added to a recorded state."""

    OPPOSITE = "opposite"
    """An open wish for the opposite of the hint."""
    OUTSIDE = "outside"
    """A situation that the hint does not cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A hint of the memory. Times are unix seconds; gaps are nats per token, on held-back states.

    `num_confirmed` counts its sources. `is_rule`: whether the judge says that it is worth keeping;
    None: not asked yet. `trained_since` is the first version that a lesson of it trained,
    `num_steps` how many did. `first_gap` was measured before the first lesson, `gap` last, with
    `gap_high` the upper bound of its interval; None: not measured.
    """

    hint_id: str
    scope: str
    text: str
    status: HintStatus
    detail: str | None
    created_at: float
    updated_at: float
    num_confirmed: int
    is_rule: bool | None
    block: RehearsalBlock | None
    opposed_by: str | None
    merged_into: str | None
    trained_since: int | None
    num_steps: int
    first_gap: float | None
    gap: float | None
    gap_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintSource:
    """The turn that a hint came from: what the judge wrote there, and what the user had said.

    `created_at` is the turn's, in unix seconds.
    """

    hint_id: str
    turn_id: str
    session_id: str
    text: str
    words: str
    num_votes: int
    num_positive: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HintPrompt:
    """Plain words that are added to the last user message of a recorded state.

    `held_out` ones measure obedience and never train. `followed` of `asked` samples of the start
    model did what the words ask; `dropped` says why the words are not used.
    """

    prompt_id: str
    hint_id: str
    kind: PromptKind
    text: str
    held_out: bool
    asked: int
    followed: int
    dropped: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintState:
    """A recorded state at which a hint is rehearsed, or, `held_out`, measured."""

    hint_id: str
    turn_id: str
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What the judge found about a new hint, all of it committed together.

    If it is merged into an equal hint of its scope, or contradicted by one that was asked for
    since, nothing else counts. `contradicts` are hints of its scope that say the opposite,
    `opposed_elsewhere` those of other scopes. `block` says why it is not to be rehearsed; None: it
    may be. A rule was looked for in `num_sessions` sessions.
    """

    hint_id: str
    merged_into: str | None = None
    contradicted_by: str | None = None
    contradicts: tuple[str, ...] = ()
    opposed_elsewhere: tuple[str, ...] = ()
    is_rule: bool = False
    block: RehearsalBlock | None = None
    prompts: tuple[HintPrompt, ...] = ()
    detail: str | None = None
    num_sessions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedHint:
    """A hint that was deleted: the policy versions that trained on it, oldest first."""

    hint_id: str
    versions: tuple[int, ...]
