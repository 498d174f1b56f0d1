"""How much a hint changes at a recorded state, as the frozen start model sees it."""

from __future__ import annotations

import logging

import numpy as np

from opd.rehearsal.desk import Desk, LessonUnusable
from records.types import Logprobs, TurnRecord
from rollout_bridge.scoring.scoring import fall_of

logger = logging.getLogger(__name__)


async def effect_at(desk: Desk, turn: TurnRecord, hint: str) -> float | None:
    """By how much the hint changes the log-prob of a token of the recorded answer, in nats: of the
    token that changes most, where the answer is decided. None if it cannot be scored. Raises
    ServiceUnavailable.
    """
    found = await _plain_and_hinted(desk, turn, hint)
    return None if found is None else float(np.abs(found[1] - found[0]).max())


async def fall_at(desk: Desk, turn: TurnRecord, hint: str) -> float | None:
    """By how many nats the hint lowers the log-prob of the answer's token that it lowers most: a
    hint that came from there speaks against the answer. None if it cannot be scored. Raises
    ServiceUnavailable.
    """
    found = await _plain_and_hinted(desk, turn, hint)
    return None if found is None else fall_of(*found)


async def part_of_words(desk: Desk, turn: TurnRecord, hint: str, words: str) -> float | None:
    """At the token that the hint lowers most: how much the user's own `words`, added to the
    request, lower it, as a part of what the hint lowers it by. About 1 if the words ask for what
    the hint asks, about 0 if they are about something else. None if it cannot be scored. Raises
    ServiceUnavailable.
    """
    found = await _plain_and_hinted(desk, turn, hint)
    if found is None:
        return None
    try:
        place = await desk.place(turn, words)
        said = await desk.score(place, None, turn.response_ids)
    except LessonUnusable as error:
        logger.info("turn %s cannot be scored with its user's words: %s", turn.turn_id, error)
        return None
    return part_of_fall(*found, said.logprobs)


def part_of_fall(plain: Logprobs, hinted: Logprobs, said: Logprobs) -> float | None:
    """From the log-probs [R] of one answer: how far the words lower the token that the hint lowers
    most, as a part of what the hint lowers it by. None if it lowers none.
    """
    token = int((plain - hinted).argmax())
    fall = float(plain[token] - hinted[token])
    # Written so that a NaN gives None too.
    return float(plain[token] - said[token]) / fall if fall > 0 else None


async def _plain_and_hinted(
    desk: Desk, turn: TurnRecord, hint: str
) -> tuple[Logprobs, Logprobs] | None:
    """The frozen start model's log-probs [R] of the recorded answer, without and under the hint."""
    if not len(turn.response_ids):
        return None
    try:
        place = await desk.place(turn)
        plain = await desk.score(place, None, turn.response_ids)
        hinted = await desk.score(place, hint, turn.response_ids)
    except LessonUnusable as error:
        logger.info("turn %s cannot be scored under a hint: %s", turn.turn_id, error)
        return None
    return plain.logprobs, hinted.logprobs
