"""Which turns become rows of a data set, and why the others do not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from records.feedback.feedback import corrected_answer
from records.names import DropReason, TurnState, TurnType
from records.reading.rated import RatedTurn
from records.reading.whole_turns import WholeTurn
from records.turns.recording import RecordingKind


class LeftOut(StrEnum):
    """Why a turn is not a row. The set is closed."""

    NOT_MAIN = "not_main"
    NOT_TO_TRAIN = "not_to_train"
    NO_NEXT_STATE = "no_next_state"
    NOT_JUDGED = "not_judged"
    NEEDED_CORRECTION = "needed_correction"
    NEGATIVE_FEEDBACK = "negative_feedback"
    NOT_TEXT = "not_text"
    # For what a text model teaches
    NEEDED_NO_CORRECTION = "needed_no_correction"
    CALLS_A_TOOL = "calls_a_tool"
    HINT_NOT_USED = "hint_not_used"
    REPEATS_A_PROMPT = "repeats_a_prompt"
    NOT_ANSWERED = "not_answered"
    # For preferences
    NO_PAIR = "no_pair"
    AMBIGUOUS_CORRECTION = "ambiguous_correction"
    REDACTED_CORRECTION = "redacted_correction"
    CORRECTS_A_CALL = "corrects_a_call"
    SAME_ANSWER = "same_answer"


WORDS: dict[LeftOut, str] = {
    LeftOut.NOT_MAIN: "side turns and text completions",
    LeftOut.NOT_TO_TRAIN: "without consent, with personal data, held out, or cut off",
    LeftOut.NO_NEXT_STATE: "nothing followed that could confirm them",
    LeftOut.NOT_JUDGED: "no judge's vote says that they were right",
    LeftOut.NEEDED_CORRECTION: "a vote or a corrected answer says that they were wrong",
    LeftOut.NEGATIVE_FEEDBACK: "the newest score is below the middle of its scale",
    LeftOut.NOT_TEXT: "they contain more than text and function calls",
    LeftOut.NEEDED_NO_CORRECTION: "no vote gave a hint for them",
    LeftOut.CALLS_A_TOOL: "they call a tool, and the judge answers in text",
    LeftOut.HINT_NOT_USED: "their hint was rejected, ended, or waits for a person",
    LeftOut.REPEATS_A_PROMPT: "they answer the prompt of a recorded turn again",
    LeftOut.NOT_ANSWERED: "the judge gave no whole answer",
    LeftOut.NO_PAIR: "no corrected answer, and no other answer to their prompt with another score",
    LeftOut.AMBIGUOUS_CORRECTION: "the feedback does not tell where the corrected answer begins",
    LeftOut.REDACTED_CORRECTION: "something was redacted in the corrected answer",
    LeftOut.CORRECTS_A_CALL: "the corrected answer is a text and the response calls a tool",
    LeftOut.SAME_ANSWER: "the two answers are the same",
}

ALLOWED = frozenset(
    {
        DropReason.UNKNOWN_VERSION,
        DropReason.MIXED_VERSION,
        DropReason.DISTRIBUTION_MODIFIED,
        DropReason.ROLLOUT_LOGPROBS_INVALID,
        DropReason.AMBIGUOUS_PARENT,
        DropReason.NO_NEXT_STATE,
        DropReason.NO_HINT,
        DropReason.NO_QUORUM,
        DropReason.HINT_REJECTED,
        DropReason.JUDGE_UNAVAILABLE,
        DropReason.JUDGE_PROMPT_TOO_LONG,
        DropReason.NO_RECORDED_VOTES,
        DropReason.OVER_CAPACITY,
        DropReason.HINT_ONLY,
        DropReason.REVIEW_REJECTED,
        DropReason.NO_USER_MESSAGE,
        DropReason.HINT_AGREES,
        DropReason.HINT_ENDED,
        DropReason.HINT_UNGUARDED,
        DropReason.HINTED_PROMPT_MISMATCH,
        DropReason.HINTED_PROMPT_TOO_LONG,
        DropReason.TEACHER_MISALIGNED,
        DropReason.TEACHER_LOGPROBS_INVALID,
        DropReason.TEACHER_UNAVAILABLE,
        DropReason.UNKNOWN_TEACHER,
        DropReason.RESAMPLED,
        DropReason.STALE,
        DropReason.BEYOND_TRAINER_MEMORY,
        DropReason.ROUTED_EXPERTS_MISSING,
        DropReason.SAMPLING_WEIGHTS_GONE,
        DropReason.FOREIGN_TOKENS,
        DropReason.ROLLOUT_REJECTED,
        DropReason.NEUTRAL_REWARD,
        DropReason.NO_OUTCOME,
        DropReason.BELOW_NOISE,
        DropReason.NONFINITE_GRADIENT,
    }
)
"""Turns with these reasons could not train this run; their text is still usable."""


_HINT_NOT_USED = frozenset(
    {
        DropReason.HINT_REJECTED,
        DropReason.HINT_AGREES,
        DropReason.HINT_ENDED,
        DropReason.REVIEW_REJECTED,
    }
)


def why_unusable(
    turn_type: TurnType,
    drop_reason: DropReason | None,
    finish_reason: str | None,
    *,
    is_held_out: bool,
) -> LeftOut | None:
    """Why a turn is in no data set at all; None if it may be. A reply that was cut at its token
    limit trains here, where each token has a teacher; as an example it would teach to stop early.
    """
    if turn_type is not TurnType.MAIN:
        return LeftOut.NOT_MAIN
    is_cut = finish_reason == "length"
    if is_cut or is_held_out or (drop_reason is not None and drop_reason not in ALLOWED):
        return LeftOut.NOT_TO_TRAIN
    return None


def why_not_demonstrated(whole: WholeTurn) -> LeftOut | None:
    """Why a turn is not an example of a good answer; None if it is one.

    It is one if the conversation went on after it, a vote says that it needed no correction, no
    vote says that it did, and nobody corrected it or scored it below the middle.
    """
    turn = whole.turn
    is_held_out = turn.recording is not None and turn.recording.held_out
    reason = why_unusable(
        turn.turn_type, turn.drop_reason, turn.finish_reason, is_held_out=is_held_out
    )
    if reason is not None:
        return reason
    if not whole.num_followed:
        return LeftOut.NO_NEXT_STATE
    scores = {vote.score for vote in whole.verdict.votes} if whole.verdict is not None else set()
    if 1 in scores or _is_corrected(whole):
        return LeftOut.NEEDED_CORRECTION
    if -1 not in scores:
        return LeftOut.NOT_JUDGED
    if turn.feedback_reward is not None and turn.feedback_reward < 0:
        return LeftOut.NEGATIVE_FEEDBACK
    return None


def why_not_taught(whole: WholeTurn) -> LeftOut | None:
    """Why a turn is not answered again by a text model; None if it is: its answer is a text, and
    the judge gave a hint for it.
    """
    turn = whole.turn
    reason = why_unusable(
        turn.turn_type,
        turn.drop_reason,
        turn.finish_reason,
        is_held_out=turn.recording is not None and turn.recording.held_out,
    )
    if reason is not None:
        return reason
    if whole.verdict is None:
        return LeftOut.NOT_JUDGED
    if whole.verdict.hint is None:
        return LeftOut.NEEDED_NO_CORRECTION
    if turn.state is TurnState.REVIEWING or turn.drop_reason in _HINT_NOT_USED:
        return LeftOut.HINT_NOT_USED
    if turn.recording is not None and turn.recording.kind is RecordingKind.RESAMPLED:
        return LeftOut.REPEATS_A_PROMPT
    return LeftOut.CALLS_A_TOOL if turn.response.get("tool_calls") else None


def _is_corrected(whole: WholeTurn) -> bool:
    try:
        return any(corrected_answer(one.message) is not None for one in whole.feedback)
    except ValueError:
        return True


def correction_of(whole: WholeTurn, redaction_marks: frozenset[str]) -> str | LeftOut:
    """The newest corrected answer of a turn, or why there is none to train on."""
    found: list[str] = []
    for one in whole.feedback:
        try:
            corrected = corrected_answer(one.message)
        except ValueError:
            return LeftOut.AMBIGUOUS_CORRECTION
        found += [corrected] if corrected is not None else []
    if not found:
        return LeftOut.NO_PAIR
    newest = found[-1].strip()
    if any(mark in newest for mark in redaction_marks):
        return LeftOut.REDACTED_CORRECTION
    if whole.turn.response.get("tool_calls"):
        return LeftOut.CORRECTS_A_CALL
    if newest == str(whole.turn.response.get("content") or "").strip():
        return LeftOut.SAME_ANSWER
    return newest


def best_and_worst(turns: Sequence[RatedTurn]) -> tuple[RatedTurn, RatedTurn] | LeftOut:
    """The turns of one prompt with the highest and the lowest score, the newest among equals; or
    why they are not a pair.
    """
    scored = [(turn.reward, turn) for turn in turns if turn.reward is not None]
    if not scored:
        return LeftOut.NO_PAIR
    newest_first = scored[::-1]
    best = max(newest_first, key=lambda one: one[0])
    worst = min(newest_first, key=lambda one: one[0])
    if best[0] == worst[0]:
        return LeftOut.NO_PAIR
    if best[1].answer == worst[1].answer:
        return LeftOut.SAME_ANSWER
    return best[1], worst[1]
