"""Each reason for which a turn or a lesson is dropped, or a hint not practised, in words for
whoever asks why, with what can be done about it.
"""

from __future__ import annotations

from records.hints.types import RehearsalBlock
from records.lessons.names import LessonDrop
from records.names import DropReason, HintRejection

DROP_WORDS: dict[DropReason, str] = {
    DropReason.INTERNAL_ERROR: "a stage failed on it unexpectedly; see the stage's log",
    DropReason.FORGOTTEN: "its content, or what it was judged by, was deleted on request",
    DropReason.SIDE_TURN: "it is a side request (a title, a summary, a ping), not the conversation",
    DropReason.TEXT_COMPLETION: "a continued text is not a conversation: nothing can follow it",
    DropReason.ABORTED: "the engine aborted the reply",
    DropReason.CLIENT_DISCONNECTED: "the client closed its connection before the reply's end",
    DropReason.LENGTH_CUT: (
        "the reply was cut at its token limit, and proxy.train_length_cut is false"
    ),
    DropReason.EMPTY_RESPONSE: "the reply is empty",
    DropReason.SENSITIVE: (
        "it contains secrets or personal data, so its tokens were not kept (store.redaction)"
    ),
    DropReason.UNKNOWN_VERSION: "the engine did not say which weights sampled it",
    DropReason.MIXED_VERSION: (
        "several versions of the weights sampled it; proxy.train_mixed_version lets it train"
    ),
    DropReason.DISTRIBUTION_MODIFIED: (
        "it was not sampled from the plain softmax (temperature 0, top-p, a grammar, ...); "
        'proxy.train_modified = "keep" lets it train'
    ),
    DropReason.ROLLOUT_LOGPROBS_INVALID: "the engine gave log-probabilities that are not finite",
    DropReason.AMBIGUOUS_PARENT: (
        "several conversations matched its request; X-Session-Id tells them apart"
    ),
    DropReason.NO_NEXT_STATE: (
        "the session ended before anything followed it; it comes back if the conversation goes on, "
        "or with feedback"
    ),
    DropReason.RECORD_ONLY: "its API key consents to being recorded, not to being trained on",
    DropReason.SHUTDOWN: "the proxy was told to stop and cut the reply off",
    DropReason.NO_HINT: "no vote of the judge found that what followed shows a better reply",
    DropReason.NO_QUORUM: "too few votes were positive (judge.min_positive_votes)",
    DropReason.HINT_REJECTED: "every hint was refused: it leaked, copied or commanded",
    DropReason.JUDGE_UNAVAILABLE: "the judge did not answer for too long",
    DropReason.JUDGE_PROMPT_TOO_LONG: (
        "reply and next state do not fit into the judge's context (judge.max_prompt_tokens)"
    ),
    DropReason.NO_RECORDED_VOTES: (
        "its recording came without votes, and the judge is not asked about recordings "
        "(judge.recorded_votes_only)"
    ),
    DropReason.OVER_CAPACITY: (
        "newer turns kept the judge busy until it was too old to train (trainer.max_staleness); "
        "the judge comes back to it in idle time, for its hint alone"
    ),
    DropReason.HINT_ONLY: (
        "too old to train when the judge reached it (trainer.max_staleness); its hint is kept"
    ),
    DropReason.REVIEW_REJECTED: "a person rejected its hint",
    DropReason.RESAMPLED: "the policy answered its prompt again, and that answer took its place",
    DropReason.HELD_OUT: "its session is kept from training, to measure on (replay.held_out)",
    DropReason.NO_USER_MESSAGE: "its prompt has no user message to which a hint could be added",
    DropReason.HINT_AGREES: (
        "fewer than half of its votes' hints make any part of the reply less likely "
        "(scoring.least_fall): they ask for what the reply did, so the judge misread what "
        "followed, or there was nothing to correct"
    ),
    DropReason.HINT_UNGUARDED: (
        "several sessions gave its hint, which is not practised (opd hints list says why): such "
        "turns alone would cost the open wish for the opposite"
    ),
    DropReason.HINT_ENDED: (
        "its hint was deleted, or a later one said the opposite, before it could train"
    ),
    DropReason.HINTED_PROMPT_MISMATCH: "adding the hint would have changed more than one message",
    DropReason.HINTED_PROMPT_TOO_LONG: "prompt and hint do not fit into the teacher's context",
    DropReason.TEACHER_MISALIGNED: "the teacher scored other tokens than those that were sampled",
    DropReason.TEACHER_LOGPROBS_INVALID: (
        "the teacher gave log-probabilities that are missing or not finite"
    ),
    DropReason.TEACHER_UNAVAILABLE: "the teacher did not answer for too long",
    DropReason.UNKNOWN_TEACHER: "its request named a teacher that this run does not have",
    DropReason.STALE: (
        "the weights that sampled it were too old when it could train (trainer.max_staleness, or "
        "what trainer.schedule allows)"
    ),
    DropReason.BEYOND_TRAINER_MEMORY: (
        "it is too long for the trainer's memory (trainer.memory_gb)"
    ),
    DropReason.ROUTED_EXPERTS_MISSING: "the engine did not say which experts its tokens went to",
    DropReason.SAMPLING_WEIGHTS_GONE: (
        "the weights that sampled it are not kept, and the objective asks them for scores "
        "(engine_cap) or for side samples that it lacks"
    ),
    DropReason.FOREIGN_TOKENS: (
        "it has tokens that the vocabulary of the policy, or of its teacher, does not have"
    ),
    DropReason.ROLLOUT_REJECTED: (
        "rollout correction rejected it: trainer and engine disagree too much about its tokens"
    ),
    DropReason.NO_OUTCOME: (
        "nobody gave its session's outcome in time, and it has no hint to train on"
    ),
    DropReason.NEUTRAL_REWARD: "its verdict is neutral and it has no hint: nothing to learn",
    DropReason.BELOW_NOISE: "its batch taught less than the noise between engines and trainer",
    DropReason.NONFINITE_GRADIENT: "its batch gave a gradient that is not finite",
}

LESSON_WORDS: dict[LessonDrop, str] = {
    LessonDrop.STALE: "another version was trained before it could train; it is sampled again",
    LessonDrop.SENSITIVE: "the policy's answer contains secrets or personal data",
    LessonDrop.FORGOTTEN: "the recorded turn that it is based on was deleted on request",
    LessonDrop.HINT_ENDED: "its hint was deleted, withdrawn, contradicted or merged, or is resting",
    LessonDrop.LENGTH_CUT: (
        "the policy's answer was cut at its token limit (rehearsal.max_new_tokens)"
    ),
    LessonDrop.EMPTY_RESPONSE: "the policy's answer is empty",
    LessonDrop.MIXED_VERSION: "the engine got new weights while it answered",
    LessonDrop.UNKNOWN_VERSION: "the engine did not say which weights sampled the answer",
    LessonDrop.ROLLOUT_LOGPROBS_INVALID: (
        "the engine gave log-probabilities of the answer that are not finite"
    ),
    LessonDrop.PROMPT_MISMATCH: (
        "words added to its recorded request would have changed more than one message"
    ),
    LessonDrop.PROMPT_TOO_LONG: "its request with the added words does not fit into the context",
    LessonDrop.TEACHER_MISALIGNED: "the teacher scored other tokens than those of the answer",
    LessonDrop.TEACHER_LOGPROBS_INVALID: (
        "the teacher's log-probabilities of the answer are missing or not finite"
    ),
    LessonDrop.BEYOND_TRAINER_MEMORY: (
        "request and answer are too long for the trainer's memory (trainer.memory_gb)"
    ),
    LessonDrop.SAMPLING_WEIGHTS_GONE: (
        "the weights that sampled it are not kept, and trainer.objective.engine_cap asks them"
    ),
    LessonDrop.FOREIGN_TOKENS: (
        "it has tokens that the vocabulary of the policy, or of its teacher, does not have"
    ),
    LessonDrop.ENGINE_UNAVAILABLE: "policy engine or teacher did not answer for too long",
    LessonDrop.BELOW_NOISE: "its batch taught less than the noise between engines and trainer",
    LessonDrop.ROLLOUT_REJECTED: (
        "rollout correction rejected it: trainer and engine disagree too much about its tokens"
    ),
    LessonDrop.NONFINITE_GRADIENT: "its batch gave a gradient that is not finite",
    LessonDrop.INTERNAL_ERROR: "a stage failed on it unexpectedly; see the stage's log",
}

BLOCK_WORDS: dict[RehearsalBlock, str] = {
    RehearsalBlock.NO_MAJORITY: "at most half of the votes on its turn asked for it",
    RehearsalBlock.NOT_EXAMINED: "the judge never answered when it was asked about it",
    RehearsalBlock.NOT_A_RULE: "the judge says that it was meant for one answer only",
    RehearsalBlock.UNCONFIRMED: (
        "its user's words would not have changed the answer: another session has to ask for it"
    ),
    RehearsalBlock.NO_STATES: "too few recorded requests to which it applies",
    RehearsalBlock.NO_COUNTER_LESSONS: (
        "too few open wishes for the opposite that the start model follows"
    ),
    RehearsalBlock.OTHER_SCOPE: "a hint of another tenant says the opposite",
}

_SIDE_WORDS = {
    "ping": (
        "it asked for one token (max_tokens = 1), which counts as a ping; ask for two or more, or "
        'leave "pings" out of proxy.side_presets'
    ),
    "declared": "the agent itself said so (X-Turn-Type: side)",
}


def side_words(rule: str) -> str:
    """Which rule made a turn a side request, and how to change that."""
    other = f"the rule {rule} says so (docs/sessions.md); X-Turn-Type: main overrides it"
    return _SIDE_WORDS.get(rule, other)


REJECTION_WORDS: dict[HintRejection, str] = {
    HintRejection.TOO_LONG: "its hint is longer than judge.max_hint_chars",
    HintRejection.CONTROL_TEXT: "its hint contains text that a chat template reads as structure",
    HintRejection.INSTRUCTS_PIPELINE: "its hint gives orders to the judge or the trainer",
    HintRejection.COPIES_NEXT_STATE: "its hint repeats what came next",
    HintRejection.NEW_VALUE: "its hint names a value that nobody had mentioned",
}
