"""The gap at turns that trained under a hint. It is to fall; a version at which it grows has not
learned what it was taught.

A version, and the start model, answer the turns' prompts again. The teacher is the start model
under the turn's hint, as in rehearsal, so that it is the same for all versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from opd.rehearsal.desk import Desk
from opd.rehearsal.measuring.measuring import compared_at
from opd.rehearsal.policy_sampler import PolicySampler
from records.types import TurnRecord
from rollout_bridge.rehearsal.estimates import MeasuredAnswer, gap_of
from rollout_bridge.rehearsal.journal import GapRow
from rollout_bridge.together import all_or_none

_AT_ONCE = 16
_MOST_KNOWN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtTurn:
    """A turn, and the hint that it trained under."""

    turn: TurnRecord
    hint: str


@dataclass(slots=True)
class GapMeasurer:
    """Measures both; the start model answers each turn once in the life of this process."""

    desk: Desk
    policy: PolicySampler
    start: PolicySampler
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    _known: dict[tuple[str, str], list[MeasuredAnswer]] = field(default_factory=dict)

    async def measure(
        self, taught: Sequence[TaughtTurn], *, samples: int, version: int
    ) -> tuple[GapRow | None, GapRow | None]:
        """The version's gap and the start's, from `samples` answers to each turn, over the turns
        that both can answer. Raises ServiceUnavailable.
        """
        start = await self._of_start(taught, samples)
        usable = [one for one in taught if start[one.turn.turn_id, one.hint]]
        now = await self._answers(self.policy, usable, samples)
        rows = (
            gap_of([answer for answers in found for answer in answers], version)
            for found in (now.values(), [start[key] for key in now if now[key]])
        )
        of_version, of_start = (GapRow.of(one) for one in rows)
        return of_version, of_start

    async def _of_start(
        self, taught: Sequence[TaughtTurn], samples: int
    ) -> dict[tuple[str, str], list[MeasuredAnswer]]:
        new = [one for one in taught if (one.turn.turn_id, one.hint) not in self._known]
        self._known |= await self._answers(self.start, new, samples)
        for key in list(self._known)[:-_MOST_KNOWN]:
            del self._known[key]
        return self._known

    async def _answers(
        self, model: PolicySampler, taught: Sequence[TaughtTurn], samples: int
    ) -> dict[tuple[str, str], list[MeasuredAnswer]]:
        asked = [one for one in taught for _ in range(samples)]
        found = await all_or_none([self._one(model, one) for one in asked])
        of_turns: dict[tuple[str, str], list[MeasuredAnswer]] = {
            (one.turn.turn_id, one.hint): [] for one in taught
        }
        for one, answer in zip(asked, found, strict=True):
            if answer is not None:
                of_turns[one.turn.turn_id, one.hint].append(answer)
        return of_turns

    async def _one(self, model: PolicySampler, one: TaughtTurn) -> MeasuredAnswer | None:
        async with self._free:
            found = await compared_at(self.desk, model, one.turn, one.hint)
            return None if found is None else found.measured
