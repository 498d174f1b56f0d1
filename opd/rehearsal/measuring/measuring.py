"""What a version has learned, and what it has lost: measured by fresh answers that never train.

gap         held-back states of a hint      log pi - log q under the hint
uptake      the same answers                do they do what the hint asks?
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
from opd.rehearsal.places import Place
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.prompt_check import followed_at
from records.hints.types import HintPrompt
from records.messages import Message
from records.types import TurnRecord
from rollout_bridge.rehearsal.estimates import Gap, MeasuredAnswer, Obedience, Rate, gap_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """The gap of some answers, and how many of them do what the hint asks; None: none could be
    measured, or judged.
    """

    gap: Gap | None
    done: Rate | None


class Measurer:
    """Measures the policy as it is now, and the `start` model; both sample at temperature 1."""

    def __init__(
        self,
        desk: Desk,
        policy: PolicySampler,
        start: PolicySampler,
        questions: Questions,
        limit: asyncio.Semaphore,
    ) -> None:
        self._desk, self._policy, self._start = desk, policy, start
        self._questions, self._limit = questions, limit

    async def keep_gap(
        self, turns: Sequence[TurnRecord], num_samples: int, seed: int
    ) -> Gap | None:
        """The gap to the start model at these states, without a hint; None if nothing could be
        measured. Raises ServiceUnavailable.
        """
        if not turns:
            return None
        found = await all_or_none(
            [self._compared(turns[i % len(turns)], None) for i in range(num_samples)]
        )
        return gap_of([one.measured for one in found if one is not None], seed)

    async def practice(
        self, turns: Sequence[TurnRecord], hint: str, num_samples: int, seed: int
    ) -> Practice:
        """The gap at these states under `hint`, and in how many of the same answers the judge sees
        what it asks. Raises ServiceUnavailable.
        """
        found = await all_or_none(
            [
                self._practised(turns[i % len(turns)], hint)
                for i in range(num_samples if turns else 0)
            ]
        )
        known = [one for one in found if one is not None]
        gap = gap_of([compared.measured for compared, _ in known], seed)
        return Practice(gap=gap, done=_rate([is_done for _, is_done in known]))

    async def of_start(
        self, turns: Sequence[TurnRecord], hint: str, num_samples: int
    ) -> tuple[Rate | None, Rate | None]:
        """In how many answers at these states the start model does what `hint` asks: unasked, and
        with the hint. Raises ServiceUnavailable.
        """
        found = await all_or_none(
            [
                self._started(turns[i % len(turns)], hint, unasked=unasked)
                for unasked in (True, False)
                for i in range(num_samples if turns else 0)
            ]
        )
        half = len(found) // 2
        return _rate(found[:half]), _rate(found[half:])

    async def obedience(self, wishes: Sequence[Wish]) -> dict[str, Obedience]:
        """Whether the policy does what each wish asks, by hint. Raises ServiceUnavailable."""
        said = await all_or_none([self._followed(wish) for wish in wishes])
        of_hints: dict[str, list[tuple[bool | None, Wish]]] = {}
        for one, wish in zip(said, wishes, strict=True):
            of_hints.setdefault(wish.hint_id, []).append((one, wish))
        return {hint_id: _obedience(answers) for hint_id, answers in of_hints.items()}

    async def _compared(self, turn: TurnRecord, hint: str | None) -> Compared | None:
        async with self._limit:
            return await compared_at(self._desk, self._policy, turn, hint)

    async def _practised(self, turn: TurnRecord, hint: str) -> tuple[Compared, bool | None] | None:
        async with self._limit:
            one = await compared_at(self._desk, self._policy, turn, hint)
            if one is None:
                return None
            messages = one.place.messages
            return one, await self._questions.followed(hint, messages, turn.tools, one.message)

    async def _started(self, turn: TurnRecord, hint: str, *, unasked: bool) -> bool | None:
        async with self._limit:
            return await followed_at(
                self._desk, self._start, self._questions, turn, hint, unasked=unasked
            )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One answer: where it was given, what it says, and its differences to the teacher."""

    place: Place
    message: Message
    measured: MeasuredAnswer


async def compared_at(
    desk: Desk, model: PolicySampler, turn: TurnRecord, hint: str | None
) -> Compared | None:
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
    measured = MeasuredAnswer(turn_id=turn.turn_id, differences=logprobs - found.logprobs)
    return Compared(place=place, message=answer.message, measured=measured)


def _rate(said: Sequence[bool | None]) -> Rate | None:
    """Of the answers on which the judge decided; None without any."""
    answered = [one for one in said if one is not None]
    return Rate(hits=sum(answered), count=len(answered)) if answered else None


def _obedience(answers: Sequence[tuple[bool | None, Wish]]) -> Obedience:
    answered = [(one, wish) for one, wish in answers if one is not None]
    return Obedience(
        followed=sum(one for one, _ in answered),
        asked=len(answered),
        abstained=len(answers) - len(answered),
        before=sum(wish.before for _, wish in answered),
    )
