"""The closed sets of names of lessons: what one teaches, where it stands, why it does not train."""

from __future__ import annotations

from enum import StrEnum


class LessonKind(StrEnum):
    """What a lesson teaches."""

    HINT = "hint"
    """The hint, at a state to which it applies; the teacher reads the hint."""
    COUNTER = "counter"
    """Its exceptions: an open wish for the opposite, or a situation outside it, in plain words; the
    teacher is the start model without the hint."""
    KEEP = "keep"
    """Everything else: a recorded state of another kind; the teacher is the start model. With a
    hint: a state of this hint, in a step that wins open wishes back; the teacher is the policy
    itself, so that the step keeps what was learned."""


class LessonState(StrEnum):
    """Where a lesson stands: sampling -> scoring -> ready -> leased -> trained, or dropped."""

    SAMPLING = "sampling"
    SCORING = "scoring"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class LessonDrop(StrEnum):
    """Why a lesson does not train. The set is closed."""

    STALE = "stale"
    SENSITIVE = "sensitive"
    FORGOTTEN = "forgotten"
    HINT_ENDED = "hint_ended"
    """Its hint was deleted, withdrawn, contradicted or merged, or is resting."""
    LENGTH_CUT = "length_cut"
    EMPTY_RESPONSE = "empty_response"
    MIXED_VERSION = "mixed_version"
    UNKNOWN_VERSION = "unknown_version"
    ROLLOUT_LOGPROBS_INVALID = "rollout_logprobs_invalid"
    PROMPT_MISMATCH = "prompt_mismatch"
    PROMPT_TOO_LONG = "prompt_too_long"
    TEACHER_MISALIGNED = "teacher_misaligned"
    BEYOND_TRAINER_MEMORY = "beyond_trainer_memory"
    SAMPLING_WEIGHTS_GONE = "sampling_weights_gone"
    FOREIGN_TOKENS = "foreign_tokens"
    TEACHER_LOGPROBS_INVALID = "teacher_logprobs_invalid"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    BELOW_NOISE = "below_noise"
    ROLLOUT_REJECTED = "rollout_rejected"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    INTERNAL_ERROR = "internal_error"
