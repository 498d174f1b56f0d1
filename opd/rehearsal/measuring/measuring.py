"""What a version has learned, and what it has lost: measured by fresh answers that never train.

gap         held-back states of a hint      log pi - log q under the hint
keep        states of other kinds           log pi - log q of the start, no hint
obedience   held-out open wishes            does the answer do what the words ask?
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.rehearsal.desk import Desk, LessonUnusable
from opd.rehearsal.needs import Questions
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.prompt_check import followed_at
from records.hints.types import HintPrompt
from records.types import TurnRecord
from rollout_bridge.rehearsal.estimates import Gap, MeasuredAnswer, Obedience, gap_of
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)

_ANSWERS_TO_A_WISH = 3
"""If the judge cannot decide whether an answer does what a wish asks, another one is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An open wish against a hint, which never trains, at one state, and how often the start model
    did it.
    """

    hint_id: str
    turn: TurnRecord
    prompt: HintPrompt

    @property
    def before(self) -> float:
        """The start model's rate."""
        return self.prompt.followed / self.prompt.asked


class Measurer:
    """Measures the policy as it is now; `policy` samples at temperature 1."""

    def __init__(
        self, desk: Desk, policy: PolicySampler, questions: Questions, limit: asyncio.Semaphore
    ) -> None:
        self._desk, self._policy, self._questions, self._limit = desk, policy, questions, limit

    async def gap(
        self, turns: Sequence[TurnRecord], hint: str | None, num_samples: int, seed: int
    ) -> Gap | None:
        """The gap at these states, under `hint` or to the start model; None if nothing could be
        measured. Raises ServiceUnavailable.
        """
        if not turns:
            return None
        found = await all_or_none(
            [self._difference(turns[i % len(turns)], hint) for i in range(num_samples)]
        )
        return gap_of([one for one in found if one is not None], seed)

    async def obedience(self, wishes: Sequence[Wish]) -> dict[str, Obedience]:
        """Whether the policy does what each wish asks, by hint. Raises ServiceUnavailable."""
        said = await all_or_none([self._followed(wish) for wish in wishes])
        of_hints: dict[str, list[tuple[bool | None, Wish]]] = {}
        for one, wish in zip(said, wishes, strict=True):
            of_hints.setdefault(wish.hint_id, []).append((one, wish))
        return {hint_id: _obedience(answers) for hint_id, answers in of_hints.items()}

    async def _difference(self, turn: TurnRecord, hint: str | None) -> MeasuredAnswer | None:
        async with self._limit:
            return await difference_at(self._desk, self._policy, turn, hint)

    async def _followed(self, wish: Wish) -> bool | None:
        """Whether the first answer that the judge can decide does it."""
        for _ in range(_ANSWERS_TO_A_WISH):
            async with self._limit:
                said = await followed_at(
                    self._desk, self._policy, self._questions, wish.turn, wish.prompt.text
                )
            if said is not None:
                return said
        return None


async def difference_at(
    desk: Desk, model: PolicySampler, turn: TurnRecord, hint: str | None
) -> MeasuredAnswer | None:
    """One answer of `model` at a state, compared with the teacher under `hint`; None if it cannot
    be measured. Raises ServiceUnavailable.
    """
    try:
        place = await desk.place(turn)
        answer = await desk.answer(model, place)
        logprobs = np.asarray(answer.rollout.logprobs, dtype=np.float32)
        if not len(logprobs) or not np.isfinite(logprobs).all():
            return None
        found = await desk.score(place, hint, np.asarray(answer.rollout.ids, dtype=np.int32))
    except LessonUnusable as error:
        logger.info("turn %s cannot be measured: %s", turn.turn_id, error)
        return None
    return MeasuredAnswer(turn_id=turn.turn_id, differences=logprobs - found.logprobs)


def _obedience(answers: Sequence[tuple[bool | None, Wish]]) -> Obedience:
    answered = [(one, wish) for one, wish in answers if one is not None]
    return Obedience(
        followed=sum(one for one, _ in answered),
        asked=len(answered),
        abstained=len(answers) - len(answered),
        before=sum(wish.before for _, wish in answered),
    )


def wishes_in_turn(of_hints: Sequence[Sequence[Wish]], count: int, *, begin: int) -> list[Wish]:
    """`count` wishes from place `begin` on, equally many of each hint; all hints and wishes take
    turns.
    """
    lists = [wishes for wishes in of_hints if wishes]
    if not lists:
        return []
    places = (divmod(place, len(lists)) for place in range(begin, begin + count))
    return [lists[hint][turn % len(lists[hint])] for turn, hint in places]
