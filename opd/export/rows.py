"""A turn as the rows of the files: pure, with token arrays as they are.

The line of a session shares what its turns have in common, as its format says
(opd/replay/recordings/formats/export/sessions.py); all other rows stand alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from records.messages import Message
from records.reading.exporting import SessionHeader, TurnPlace
from records.reading.whole_turns import WholeTurn
from records.tables.arrays import shared_prefix
from records.tables.columns import dump_json
from records.training.step_results import StoredSample
from records.types import UNSCORED, TurnRecord

FORMAT = "hindsight-opd-export"
VERSION = 2

Row = dict[str, Any]


def session_head(session: SessionHeader) -> Row:
    """The fields of a session's line before its turns."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "session_id": session.session_id,
        "session_name": session.name or "",
        "created_at": session.created_at,
        "last_seen": session.last_seen,
        "close_reason": session.close_reason or "",
        "outcome_reward": session.outcome,
    }


def line_turn(place: TurnPlace, whole: WholeTurn, parent: TurnRecord | None, ids: bool) -> Row:
    """A turn in its session's line; `parent` is its parent if the line has it."""
    turn = whole.turn
    before = [*parent.messages, parent.response] if parent is not None else []
    num_shared = _num_equal(before, turn.messages)
    row: Row = {
        "turn_id": turn.turn_id,
        "parent_turn_id": parent.turn_id if parent is not None else None,
        "position": place.position,
        "shared_messages": num_shared,
        "messages": turn.messages[num_shared:],
    }
    if dump_json(turn.tools) != dump_json(parent.tools if parent is not None else []):
        row["tools"] = turn.tools
    row |= _text_fields(whole)
    if ids and has_ids(turn):
        row |= _line_ids(turn, parent)
    return row


def has_ids(turn: TurnRecord) -> bool:
    """Whether the ids of a turn are stored: those of a redacted turn are not."""
    return len(turn.prompt_ids) > 0 and len(turn.response_ids) > 0


def _line_ids(turn: TurnRecord, parent: TurnRecord | None) -> Row:
    before = np.empty(0, dtype=np.int32)
    if parent is not None and has_ids(parent):
        before = np.concatenate([parent.prompt_ids, parent.response_ids])
    num_shared = shared_prefix(before, turn.prompt_ids)
    row: Row = {
        "shared_ids": num_shared,
        "prompt_ids": turn.prompt_ids[num_shared:],
        "response_ids": turn.response_ids,
        "rollout_logprobs": None,
    }
    temperature = temperature_of(turn)
    # Without the temperature, it is unknown what distribution they are from.
    if temperature is not None and np.isfinite(turn.rollout_logprobs).all():
        row |= {"temperature": temperature, "rollout_logprobs": turn.rollout_logprobs}
    return row


def temperature_of(turn: TurnRecord) -> float | None:
    """The sampling temperature; None if it is unknown or was 0."""
    value = turn.sampling.get("temperature")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    return float(value)


def table_turn(
    session: SessionHeader, place: TurnPlace, whole: WholeTurn, renderer: str | None
) -> Row:
    """A turn as a row that stands alone; `renderer` is None if no ids are wanted."""
    turn = whole.turn
    row: Row = {
        "session_id": turn.session_id,
        "session_name": session.name,
        "turn_id": turn.turn_id,
        "parent_turn_id": place.parent_id,
        "position": place.position,
        "messages": turn.messages,
        "tools": turn.tools,
        **_text_fields(whole),
        "temperature": temperature_of(turn),
    }
    if renderer is not None and has_ids(turn):
        row |= {
            "renderer": renderer,
            "prompt_ids": turn.prompt_ids,
            "response_ids": turn.response_ids,
            "rollout_logprobs": turn.rollout_logprobs,
        }
    return row


def _text_fields(whole: WholeTurn) -> Row:
    turn, verdict = whole.turn, whole.verdict
    return {
        "response": turn.response,
        "next_state": turn.next_state,
        "turn_type": turn.turn_type.value,
        "feedback": [
            {"content": one.message["content"], "reward": one.reward, "created_at": one.created_at}
            for one in whole.feedback
        ],
        "data_source": turn.data_source,
        "teacher_key": turn.teacher_key,
        "teacher": whole.score.teacher if whole.score is not None else None,
        "votes": [vote.text for vote in verdict.votes] if verdict and verdict.votes else None,
        "hint": turn.hint,
        "reward": verdict.reward if verdict is not None else None,
        "state": turn.state.value,
        "drop_reason": turn.drop_reason.value if turn.drop_reason is not None else None,
        "drop_detail": whole.drop_detail,
        "trained_version": whole.trained_version,
        "recording": turn.recording.kind.value if turn.recording is not None else None,
        "sampling": turn.sampling,
        "distribution_modified": turn.distribution_modified,
        "version_spans": [[span.version, span.start, span.end] for span in turn.version_spans],
        "finish_reason": turn.finish_reason,
        "created_at": turn.created_at,
    }


def vote_rows(whole: WholeTurn) -> Iterator[Row]:
    """The votes on a turn."""
    for vote in whole.verdict.votes if whole.verdict is not None else ():
        yield {
            **_names(whole.turn),
            "index": vote.index,
            "score": vote.score,
            "hint": vote.hint,
            "rejected": vote.rejected.value if vote.rejected is not None else None,
            "text": vote.text,
            "error": vote.error,
            "latency_s": vote.latency_s,
            "prompt_tokens": vote.prompt_tokens,
            "completion_tokens": vote.completion_tokens,
        }


def hint_rows(whole: WholeTurn) -> Iterator[Row]:
    """The verdict on a turn, also one without a hint."""
    verdict = whole.verdict
    if verdict is not None:
        yield {
            **_names(whole.turn),
            "hint": verdict.hint,
            "candidates": list(verdict.candidates),
            "reward": verdict.reward,
            "selection": verdict.selection,
            "judge": verdict.judge,
            "num_omitted": verdict.num_omitted,
        }


def sample_rows(whole: WholeTurn) -> Iterator[Row]:
    """What training did with a turn, with its current score."""
    score = whole.score
    is_scored = score is not None and score.teacher_version != UNSCORED
    for sample in whole.samples:
        yield {
            **_names(whole.turn),
            "version": sample.version,
            "staleness": sample.staleness,
            "data_source": whole.turn.data_source,
            "teacher_key": whole.turn.teacher_key,
            "advantage_mean": sample.advantage_mean,
            "advantage_abs_max": sample.advantage_abs_max,
            "advantages": sample.advantages,
            **_figures(sample),
            "response_ids": whole.turn.response_ids,
            "rollout_logprobs": whole.turn.rollout_logprobs,
            "teacher": score.teacher if score is not None else None,
            "teacher_version": score.teacher_version if score is not None else None,
            "teacher_logprobs": score.teacher_logprobs if score and is_scored else None,
            "hint": score.hint if score is not None else None,
            "created_at": sample.created_at,
        }


def _figures(sample: StoredSample) -> Row:
    """What the step computed at each token; null where that is not stored."""
    names = ("log_ratios", "weights", "entropies", "engine_gaps")
    figures = sample.figures
    return {name: None if figures is None else getattr(figures, name) for name in names}


def _names(turn: TurnRecord) -> Row:
    return {"session_id": turn.session_id, "turn_id": turn.turn_id}


def _num_equal(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many messages at the start are the same, to the last field."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        # Equal in Python is not enough: 1 == True. Turns read together share their messages.
        if one is not other and dump_json(one) != dump_json(other):
            return number
    return min(len(left), len(right))
