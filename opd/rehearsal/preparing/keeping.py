"""States of other kinds, at which the policy must stay as it began.

They come from every consenting scope, one of each kind of step in turn, and from hints that no
longer apply: what those taught is undone until the policy answers their states like the start
model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from itertools import zip_longest

from opd.rehearsal.needs import RehearsalStore
from opd.rehearsal.preparing.preparing import HintPreparation, PreparedHint
from records.hints.types import ENDED_STATUSES, Hint
from records.messages import Message
from records.types import TurnRecord
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)

_MOST_ENDED = 32
_MOST_LOOKED_AT = 512
"""Newest ended hints, among which those that must still be undone are sought."""
_CANDIDATES = 8
_PAUSE_S = 5.0
"""Before another try, if the judge did not answer."""


class Keeping:
    """The states that are kept, chosen again when hints change or some are missing.

    Choosing asks the judge about many states, so it runs in parallel to everything else (`choose`);
    meanwhile the known ones are used.
    """

    def __init__(
        self, store: RehearsalStore, preparation: HintPreparation, config: RehearsalConfig
    ) -> None:
        self._store, self._preparation, self._config = store, preparation, config
        self._kept: list[str] = []
        self._of_ended: dict[str, list[str]] = {}
        self._chosen_for: frozenset[str] | None = None
        self._looked_at = self._not_before = 0.0
        self._warned = self.has_tried = False
        """Whether states have been sought since this process began."""

    async def to_bring_back(self, returned: Collection[str]) -> list[Hint]:
        """Hints that ended and were trained on, except those that have `returned`."""
        ended = await self._store.hints(statuses=ENDED_STATUSES, limit=_MOST_LOOKED_AT)
        left = [one for one in ended if one.trained_since is not None]
        return [one for one in left if one.hint_id not in returned][:_MOST_ENDED]

    async def states(self, hints: Sequence[PreparedHint]) -> list[TurnRecord]:
        """States to which no hint applies of those they were chosen for, and that belong to none of
        `hints`.
        """
        taken = _states_of(hints)
        turns = await self._store.load_turns([one for one in self._kept if one not in taken])
        return [turn for turn in turns if len(turn.prompt_ids)]

    def ended(self, ended: Sequence[Hint], hints: Sequence[PreparedHint]) -> dict[str, list[str]]:
        """For ended hints whose states were chosen: the turns at which no other hint applies."""
        taken = _states_of(hints)
        return {
            one.hint_id: [state for state in self._of_ended[one.hint_id] if state not in taken]
            for one in ended
            if one.hint_id in self._of_ended
        }

    def is_due(self, hints: Sequence[PreparedHint], ended: Sequence[Hint]) -> bool:
        """Whether states must be chosen now."""
        now = time.monotonic()
        if now < self._not_before:
            return False
        if _names(hints, ended) != self._chosen_for:
            return True
        is_short = len(self._kept) < self._config.max_keep_states
        return is_short and now - self._looked_at >= self._config.states_every_s

    async def choose(self, hints: Sequence[PreparedHint], ended: Sequence[Hint]) -> None:
        """Choose states again, for these hints. Raises ServiceUnavailable and StoreUnavailable;
        then the known ones stay.
        """
        self._not_before = time.monotonic() + _PAUSE_S
        try:
            kept = await self._choose(hints)
            of_ended = {}
            for one in ended:
                turns = await self._store.load_turns(await self._store.taught_at(one.hint_id))
                found = await self._of_another_kind(turns, hints, len(turns))
                of_ended[one.hint_id] = [turn.turn_id for turn in found]
        finally:
            self.has_tried = True
        self._kept, self._of_ended = kept, of_ended
        self._chosen_for, self._looked_at = _names(hints, ended), time.monotonic()
        self._not_before = 0.0
        if not kept and hints and not self._warned:
            logger.warning(
                "no recorded state is kept as it is: the judge is not sure at any that no hint "
                "applies, so nothing preserves what nobody spoke of"
            )
        self._warned = not kept

    async def _choose(self, hints: Sequence[PreparedHint]) -> list[str]:
        wanted = self._config.max_keep_states
        near = await self._store.keep_states(
            exclude_hints=[one.hint.hint_id for one in hints], limit=_CANDIDATES * wanted
        )
        taken = _states_of(hints)
        known = [one for one in self._kept if one not in taken]
        candidates = [*known, *(turn_id for turn_id in near if turn_id not in known)]
        turns = kinds_in_turn(await self._store.load_turns(candidates))
        return [turn.turn_id for turn in await self._of_another_kind(turns, hints, wanted)]

    async def _of_another_kind(
        self, turns: Sequence[TurnRecord], hints: Sequence[PreparedHint], most: int
    ) -> list[TurnRecord]:
        """The first `most` turns of another kind; it asks about as many at a time as are still
        wanted.
        """
        left = [turn for turn in turns if len(turn.prompt_ids)]
        found: list[TurnRecord] = []
        while left and len(found) < most:
            part, left = left[: most - len(found)], left[most - len(found) :]
            said = await all_or_none(
                [self._preparation.is_of_another_kind(turn, hints) for turn in part]
            )
            found += [turn for turn, is_one in zip(part, said, strict=True) if is_one]
        return found


def _names(hints: Sequence[PreparedHint], ended: Sequence[Hint]) -> frozenset[str]:
    return frozenset({*(one.hint.hint_id for one in hints), *(one.hint_id for one in ended)})


def _states_of(hints: Sequence[PreparedHint]) -> set[str]:
    return {turn.turn_id for one in hints for turn in (*one.training, *one.held_back)}


def kinds_in_turn(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """The same turns, one of each kind of step in turn: otherwise, only what an agent does often
    would be kept. Within a kind, they stay in order.
    """
    kinds: dict[tuple[tuple[str, ...], tuple[str, ...]], list[TurnRecord]] = {}
    for turn in turns:
        kinds.setdefault(step_kind(turn), []).append(turn)
    rounds = zip_longest(*kinds.values())
    return [turn for of_round in rounds for turn in of_round if turn is not None]


def step_kind(turn: TurnRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tools whose results a turn answers, and those that it calls."""
    answered: set[str] = set()
    if turn.messages and turn.messages[-1].get("role") == "tool":
        asked = [one for one in turn.messages if one.get("role") == "assistant"]
        answered = _called(asked[-1]) if asked else set()
    return tuple(sorted(answered)), tuple(sorted(_called(turn.response)))


def _called(message: Message) -> set[str]:
    return {call["function"]["name"] for call in message.get("tool_calls") or ()}
