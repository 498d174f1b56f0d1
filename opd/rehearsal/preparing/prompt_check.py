"""Whether the start model does what a text asks: otherwise a counter-lesson would teach the
opposite.

The frozen engine answers at a few of the hint's states with the text added, and the judge decides
for each answer whether it does as asked. For a text that measures obedience, the start model is
asked again and more often: the rate of texts that were chosen for a high rate would be too high.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from opd.rehearsal.desk import Desk, LessonUnusable
from opd.rehearsal.needs import Questions
from opd.rehearsal.policy_sampler import PolicySampler
from records.hints.types import HintPrompt
from records.types import TurnRecord
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)

_LEAST_FOLLOWED = 0.6
_LEAST_ANSWERED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """`followed` of `asked` answers; `dropped` is why the text is not used."""

    asked: int
    followed: int
    dropped: str | None


async def followed_at(
    desk: Desk,
    engine: PolicySampler,
    questions: Questions,
    turn: TurnRecord,
    words: str,
    *,
    unasked: bool = False,
) -> bool | None:
    """Whether one answer at this state does what `words` ask, which are added to it, but if it is
    to do so `unasked`. None: the judge cannot decide, or there was nothing to judge. Raises
    ServiceUnavailable.
    """
    try:
        place = await desk.place(turn, None if unasked else words)
        answer = await desk.answer(engine, place)
    except LessonUnusable as error:
        logger.info("turn %s cannot be answered with %r added: %s", turn.turn_id, words, error)
        return None
    return await questions.followed(words, place.messages, turn.tools, answer.message)


async def check_prompt(
    desk: Desk,
    start: PolicySampler,
    questions: Questions,
    prompt: HintPrompt,
    turns: Sequence[TurnRecord],
    num_samples: int,
    limit: asyncio.Semaphore,
) -> Checked:
    """Ask the start model `num_samples` times, at these states in turn. Raises ServiceUnavailable,
    and then nothing is decided.
    """
    return judged(await _asked(desk, start, questions, prompt.text, turns, num_samples, limit))


def judged(said: Sequence[bool | None]) -> Checked:
    """What these answers to one text mean."""
    answered = [one for one in said if one is not None]
    followed = sum(answered)
    dropped = None
    if len(answered) < max(_LEAST_ANSWERED * len(said), 1):
        dropped = f"the judge could decide on only {len(answered)} of {len(said)} answers"
    elif followed < _LEAST_FOLLOWED * len(answered):
        dropped = f"the start model does it in {followed} of {len(answered)} answers"
    return Checked(asked=len(answered), followed=followed, dropped=dropped)


async def _asked(
    desk: Desk,
    start: PolicySampler,
    questions: Questions,
    words: str,
    turns: Sequence[TurnRecord],
    count: int,
    limit: asyncio.Semaphore,
) -> list[bool | None]:
    async def one(index: int) -> bool | None:
        async with limit:
            return await followed_at(desk, start, questions, turns[index % len(turns)], words)

    return await all_or_none([one(index) for index in range(count)])
