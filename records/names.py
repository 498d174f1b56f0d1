"""The closed sets of names: what a turn is, where it stands, why it does not train, and what a
request may be used for. Each has one name, in the store, the metrics and the logs alike.
"""

from __future__ import annotations

from enum import StrEnum


class TurnType(StrEnum):
    """Only `main` turns train; `side` turns are recorded and forwarded, and so are `text` turns:
    continuations of a text that is not a conversation.
    """

    MAIN = "main"
    SIDE = "side"
    TEXT = "text"


class TurnState(StrEnum):
    """Where a turn stands. A turn is inserted, with its tokens, when its reply is complete.

    awaiting_next_state -> judging -> scoring -> ready -> leased -> trained, or dropped from any.
    `judging` and `scoring` mean "waiting for that worker, or claimed by one". Between them a turn
    is `reviewing` if a person is to see its hint first. A turn that got a reward and no hint skips
    `scoring`.
    """

    AWAITING_NEXT_STATE = "awaiting_next_state"
    JUDGING = "judging"
    REVIEWING = "reviewing"
    SCORING = "scoring"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a turn does not train. The set is closed: a new way to drop needs a new name here."""

    # Decided by whatever stage had the turn in hand.
    INTERNAL_ERROR = "internal_error"
    # Deletion of its content was requested while it was on its way, or is in progress.
    FORGOTTEN = "forgotten"
    # Decided when the reply is recorded. RECORD_ONLY: its key consents to no more.
    RECORD_ONLY = "record_only"
    SIDE_TURN = "side_turn"
    TEXT_COMPLETION = "text_completion"
    ABORTED = "aborted"
    CLIENT_DISCONNECTED = "client_disconnected"
    SHUTDOWN = "shutdown"
    LENGTH_CUT = "length_cut"
    EMPTY_RESPONSE = "empty_response"
    SENSITIVE = "sensitive"
    UNKNOWN_VERSION = "unknown_version"
    MIXED_VERSION = "mixed_version"
    DISTRIBUTION_MODIFIED = "distribution_modified"
    ROLLOUT_LOGPROBS_INVALID = "rollout_logprobs_invalid"
    AMBIGUOUS_PARENT = "ambiguous_parent"
    # Decided when the conversation ends.
    NO_NEXT_STATE = "no_next_state"
    # Decided by the judge worker.
    NO_HINT = "no_hint"
    NO_QUORUM = "no_quorum"
    HINT_REJECTED = "hint_rejected"
    JUDGE_UNAVAILABLE = "judge_unavailable"
    JUDGE_PROMPT_TOO_LONG = "judge_prompt_too_long"
    NO_RECORDED_VOTES = "no_recorded_votes"
    # OVER_CAPACITY: not judged in time to train; the judge may judge it later, in idle time.
    # HINT_ONLY: it did, and only the hint is used.
    OVER_CAPACITY = "over_capacity"
    HINT_ONLY = "hint_only"
    # Decided by a person.
    REVIEW_REJECTED = "review_rejected"
    # Decided by the scoring worker.
    NO_USER_MESSAGE = "no_user_message"
    HINT_AGREES = "hint_agrees"
    HINTED_PROMPT_MISMATCH = "hinted_prompt_mismatch"
    HINTED_PROMPT_TOO_LONG = "hinted_prompt_too_long"
    TEACHER_MISALIGNED = "teacher_misaligned"
    TEACHER_LOGPROBS_INVALID = "teacher_logprobs_invalid"
    TEACHER_UNAVAILABLE = "teacher_unavailable"
    UNKNOWN_TEACHER = "unknown_teacher"
    RESAMPLED = "resampled"
    HELD_OUT = "held_out"
    # Its hint was deleted, contradicted or withdrawn before it trained.
    HINT_ENDED = "hint_ended"
    # Several sessions gave its hint, which is not practised: nothing would guard what it teaches.
    HINT_UNGUARDED = "hint_unguarded"
    # Decided by the trainer.
    STALE = "stale"
    BEYOND_TRAINER_MEMORY = "beyond_trainer_memory"
    ROUTED_EXPERTS_MISSING = "routed_experts_missing"
    SAMPLING_WEIGHTS_GONE = "sampling_weights_gone"
    FOREIGN_TOKENS = "foreign_tokens"
    ROLLOUT_REJECTED = "rollout_rejected"
    NEUTRAL_REWARD = "neutral_reward"
    NO_OUTCOME = "no_outcome"
    BELOW_NOISE = "below_noise"
    NONFINITE_GRADIENT = "nonfinite_gradient"


class Consent(StrEnum):
    """What the contents of a key's requests may be used for: training; recording only; neither."""

    TRAIN = "train"
    RECORD = "record"
    NONE = "none"


REJUDGEABLE = frozenset(
    {
        DropReason.NO_NEXT_STATE,
        DropReason.NO_HINT,
        DropReason.NO_QUORUM,
        DropReason.HINT_REJECTED,
        DropReason.JUDGE_UNAVAILABLE,
        DropReason.NO_RECORDED_VOTES,
        DropReason.OVER_CAPACITY,
        DropReason.HINT_ONLY,
        DropReason.REVIEW_REJECTED,
        DropReason.HINT_AGREES,
        DropReason.NO_OUTCOME,
    }
)
"""Drops that judging a longer next state may undo."""


UNJUDGED = frozenset(
    {
        DropReason.JUDGE_UNAVAILABLE,
        DropReason.JUDGE_PROMPT_TOO_LONG,
        DropReason.NO_RECORDED_VOTES,
        DropReason.OVER_CAPACITY,
    }
)
"""Drops of turns that no judge has judged: no share of accepted turns counts them."""


class SideSource(StrEnum):
    """Where side samples come from. The set is closed."""

    POLICY = "policy"
    """Drawn by the weights that sampled the turn or, where a trainer keeps none, by those that
    served when it was scored.
    """
    POLICY_TOP = "policy_top"
    """The likeliest tokens of these weights."""
    TEACHER = "teacher"
    """Drawn by the teacher under the hint."""


class ReviewDecision(StrEnum):
    """What a person decided on a hint of the judge. The set is closed."""

    APPROVED = "approved"
    EDITED = "edited"
    """Approved in other words."""
    REJECTED = "rejected"


class FeedbackOutcome(StrEnum):
    """What became of feedback. The set is closed."""

    TO_BE_JUDGED = "to_be_judged"
    """The judge has not looked at the turn yet, and will read it."""
    JUDGED_AGAIN = "judged_again"
    """The turn was judged, or was being judged, without it, and is judged again with it."""
    TOO_LATE = "too_late"
    """The trainer has the turn, or had it. The feedback is kept and changes nothing."""
    NOT_TRAINED = "not_trained"
    """The turn does not train, whatever is said about it. The feedback is kept."""


class HintRejection(StrEnum):
    """Why the hint of a positive vote is refused (judge/votes/screening.py). The set is closed."""

    TOO_LONG = "too_long"
    CONTROL_TEXT = "control_text"
    INSTRUCTS_PIPELINE = "instructs_pipeline"
    COPIES_NEXT_STATE = "copies_next_state"
    NEW_VALUE = "new_value"
