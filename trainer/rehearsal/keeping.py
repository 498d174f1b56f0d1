"""States of other kinds, at which the policy is to stay as it began.

They come from every consenting scope, one of each kind of step in turn, and from hints that hold no
more: what those taught goes back until their states answer as the start model does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import zip_longest

from records.hints.types import Hint, HintStatus
from records.messages import Message
from records.types import TurnRecord
from trainer.rehearsal.config import RehearsalConfig
from trainer.rehearsal.needs import RehearsalStore
from trainer.rehearsal.preparing import Preparation, Prepared

_ENDED = (HintStatus.CONTRADICTED, HintStatus.WITHDRAWN, HintStatus.DELETED)
_MOST_ENDED = 32
_CANDIDATES = 8


class Keeping:
    """The states that are kept, chosen anew when hints change or some are missing."""

    def __init__(
        self, store: RehearsalStore, preparation: Preparation, config: RehearsalConfig
    ) -> None:
        self._store, self._preparation, self._config = store, preparation, config
        self._kept: list[str] = []
        self._chosen_for: frozenset[str] = frozenset()
        self._looked_at = 0.0

    async def states(self, hints: Sequence[Prepared]) -> list[TurnRecord]:
        """States to which none of these hints applies. Raises ServiceUnavailable."""
        names = frozenset(one.hint.hint_id for one in hints)
        now = time.monotonic()
        is_due = now - self._looked_at >= self._config.states_every_s
        if names != self._chosen_for or (is_due and len(self._kept) < self._config.max_keep_states):
            self._kept = await self._choose(hints)
            self._chosen_for, self._looked_at = names, now
        turns = await self._store.load_turns(self._kept)
        return [turn for turn in turns if len(turn.prompt_ids)]

    async def ended(
        self, returned: Collection[str], hints: Sequence[Prepared]
    ) -> dict[str, tuple[Hint, list[TurnRecord]]]:
        """Hints that hold no more and were trained on, with those of their states at which no
        other hint applies; but for those that have `returned`.
        """
        found = {}
        for hint in await self._store.hints(statuses=_ENDED, limit=_MOST_ENDED):
            if hint.trained_since is None or hint.hint_id in returned:
                continue
            states = [state.turn_id for state in await self._store.hint_states(hint.hint_id)]
            turns = await self._store.load_turns(states)
            found[hint.hint_id] = (hint, await self._of_another_kind(turns, hints, len(turns)))
        return found

    async def _choose(self, hints: Sequence[Prepared]) -> list[str]:
        wanted = self._config.max_keep_states
        near = await self._store.keep_states(
            exclude_hints=[one.hint.hint_id for one in hints], limit=_CANDIDATES * wanted
        )
        candidates = [*self._kept, *(turn_id for turn_id in near if turn_id not in self._kept)]
        turns = kinds_in_turn(await self._store.load_turns(candidates))
        return [turn.turn_id for turn in await self._of_another_kind(turns, hints, wanted)]

    async def _of_another_kind(
        self, turns: Sequence[TurnRecord], hints: Sequence[Prepared], most: int
    ) -> list[TurnRecord]:
        found: list[TurnRecord] = []
        for turn in turns:
            if len(found) == most:
                break
            if len(turn.prompt_ids) and await self._preparation.is_of_another_kind(turn, hints):
                found.append(turn)
        return found


def kinds_in_turn(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """The same turns, one of each kind of step after the other: what an agent does often would
    else be all that is kept. In a kind they stay in their order.
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
