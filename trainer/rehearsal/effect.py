"""How much a hint changes at a recorded state, as the frozen start model sees it."""

from __future__ import annotations

import logging

import numpy as np

from records.types import TurnRecord
from trainer.rehearsal.desk import Desk, LessonUnusable

logger = logging.getLogger(__name__)


async def effect_at(desk: Desk, turn: TurnRecord, hint: str) -> float | None:
    """By how much the hint changes the log-prob of a token of the recorded answer, in nats: of the
    token where it changes most, which is where the answer is decided. None where that cannot be
    scored. Raises ServiceUnavailable.
    """
    if not len(turn.response_ids):
        return None
    try:
        place = await desk.place(turn)
        plain = await desk.score(place, None, turn.response_ids)
        hinted = await desk.score(place, hint, turn.response_ids)
    except LessonUnusable as error:
        logger.info("turn %s cannot be looked at under a hint: %s", turn.turn_id, error)
        return None
    return float(np.abs(hinted.logprobs - plain.logprobs).max())
