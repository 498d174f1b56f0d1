"""Before a hint is practised: its states are chosen, and its texts are tested on the start model.

Everything found is stored at once, so that a process that dies here repeats only what was not
answered yet. What the judge said about states that are not chosen is kept only in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from opd.rehearsal.desk import Desk
from opd.rehearsal.needs import Questions, RehearsalStore
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.effect import effect_at
from opd.rehearsal.preparing.prompt_check import check_prompt
from opd.rehearsal.preparing.states import (
    answers_objection,
    called_tools,
    choose_states,
    was_accepted_since,
    was_said_before,
)
from records.hints.memory import MAX_TEXTS
from records.hints.texts import measuring_texts, usable
from records.hints.types import Hint, HintPrompt, HintSource, PromptKind, RehearsalBlock
from records.types import TurnRecord
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)

_CANDIDATES = 4
"""Candidates that are examined for each state that is wanted."""
_REMEMBERED = 50_000
_SOURCES = 8
"""Number of a hint's sources at which its effect is measured."""
_HINTS_AT_ONCE = 8
"""Hints for which the judge is asked at a time whether they apply: one that does is enough."""
_LEAST_EFFECT = 0.1
_MOST_SOURCES = 1000
_ENOUGH_WISHES = 4
"""If the start model follows fewer, the judge writes more: few texts would be learned by heart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedHint:
    """A hint with its states and texts; held-back ones measure and never train."""

    hint: Hint
    training: tuple[TurnRecord, ...]
    held_back: tuple[TurnRecord, ...]
    prompts: tuple[HintPrompt, ...]
    wishes: tuple[HintPrompt, ...]

    @property
    def open_wishes(self) -> list[HintPrompt]:
        """Usable texts for the opposite, those that train and those that measure."""
        trained = [one for one in self.prompts if one.kind is PromptKind.OPPOSITE]
        return [*trained, *self.wishes]

    @property
    def measured_at(self) -> tuple[TurnRecord, ...]:
        """Where its gap is measured: at held-back states or, if there are too few states, where it
        trains.
        """
        return self.held_back or self.training


class HintPreparation:
    """Chooses states and tests texts. `start` samples from the frozen engine at temperature 1. All
    methods raise ServiceUnavailable and StoreUnavailable, and lose nothing that was found.
    """

    def __init__(
        self,
        store: RehearsalStore,
        questions: Questions,
        desk: Desk,
        start: PolicySampler,
        config: RehearsalConfig,
        limit: asyncio.Semaphore,
    ) -> None:
        self._store, self._questions, self._desk = store, questions, desk
        self._start, self._config, self._limit = start, config, limit
        self._said: OrderedDict[tuple[str, str, str], bool | None] = OrderedDict()
        self._effects: OrderedDict[tuple[str, str], float | None] = OrderedDict()
        self._num_texts: dict[str, int] = {}

    async def prepare(self, hint: Hint) -> PreparedHint | None:
        """Choose states and test texts of one hint; None if it cannot be practised yet, for the
        reason that its block states.
        """
        if not await self._has_states(hint):
            return None
        await self._try_prompts(hint, PromptKind.OPPOSITE)
        await self._ask_start_of_wishes(hint)
        if hint.first_gap is not None:
            # Only now: its turns wait until it is practised.
            await self._try_prompts(hint, PromptKind.OUTSIDE)
        prepared = await self.load(hint)
        if not prepared.training:
            await self._block(hint, RehearsalBlock.NO_STATES, "its states are gone")
            return None
        if not self._config.without_counter and hint.first_gap is None:
            if len(prepared.open_wishes) < _ENOUGH_WISHES and await self._gets_more_texts(hint):
                return None
            self._num_texts.pop(hint.hint_id, None)
        if not prepared.wishes and not self._config.without_counter:
            detail = await self._why_no_prompt(hint)
            await self._block(hint, RehearsalBlock.NO_COUNTER_LESSONS, detail)
            return None
        measuring = [one.prompt_id for one in prepared.wishes]
        await self._store.settle_prompts(hint.hint_id, measuring)
        await self._block(hint, None, None)
        return prepared

    async def load(self, hint: Hint) -> PreparedHint:
        """What is stored about a prepared hint."""
        states = await self._store.hint_states(hint.hint_id)
        held = {state.turn_id for state in states if state.held_out}
        turns = _with_tokens(await self._store.load_turns([state.turn_id for state in states]))
        prompts = await self._store.hint_prompts(hint.hint_id)
        tried = usable(prompts)
        measuring = measuring_texts(tried)
        return PreparedHint(
            hint=hint,
            training=tuple(turn for turn in turns if turn.turn_id not in held),
            held_back=tuple(turn for turn in turns if turn.turn_id in held),
            prompts=tuple(one for one in tried if one.prompt_id not in measuring),
            wishes=tuple(one for one in tried if one.prompt_id in measuring),
        )

    async def _has_states(self, hint: Hint) -> bool:
        config = self._config
        known = await self._store.hint_states(hint.hint_id)
        loaded = await self._store.load_turns([state.turn_id for state in known])
        turns = await self._without_objections(_with_tokens(loaded))
        given = await self._store.hint_sources(hint.hint_id, _MOST_SOURCES)
        turns = await self._wanted(hint, turns, given)
        if len(turns) < config.max_states:
            have = {state.turn_id for state in known}
            turns += await self._further_states(hint, have, given, config.max_states - len(turns))
        chosen = choose_states(
            hint.hint_id,
            turns,
            known,
            max_states=config.max_states,
            min_messages=config.min_messages,
            held_back=config.held_back,
        )
        if not chosen:
            await self._block(
                hint,
                RehearsalBlock.NO_STATES,
                f"{len(turns)} recorded states, with fewer than {config.min_messages} different "
                "last user messages",
            )
            return False
        if set(chosen) != set(known):
            await self._store.set_hint_states(hint.hint_id, chosen)
        return True

    async def _wanted(
        self, hint: Hint, turns: Sequence[TurnRecord], given: Sequence[HintSource]
    ) -> list[TurnRecord]:
        """Those of these states whose user neither gave the hint before nor accepted the opposite
        since. Known states are checked too: users go on after a state was chosen.
        """
        accepted = await self._store.accepted_turns([turn.turn_id for turn in turns])
        sources = {one.turn_id for one in given}

        async def is_wanted(turn: TurnRecord) -> bool:
            if was_said_before(turn, given):
                return False
            if turn.turn_id in sources or not was_accepted_since(turn, accepted, given):
                return True
            return await self._heeds(hint, turn) is not False

        said = await all_or_none([is_wanted(turn) for turn in turns])
        return [turn for turn, is_one in zip(turns, said, strict=True) if is_one]

    async def _further_states(
        self, hint: Hint, known: Collection[str], given: Sequence[HintSource], missing: int
    ) -> list[TurnRecord]:
        """Further states at which the hint may be practised, at least `missing` if there are that
        many, the likeliest first.
        """
        wanted = self._config.max_states
        by_judge = self._config.state_rule == "judge"
        rule = "near" if by_judge else self._config.state_rule
        near = await self._store.states_near(
            hint.hint_id, rule=rule, limit=_CANDIDATES * wanted if by_judge else wanted
        )
        loaded = await self._store.load_turns([turn_id for turn_id in near if turn_id not in known])
        turns = await self._without_objections(_with_tokens(loaded))
        sources = [one.turn_id for one in given]
        least = await self._least_effect(hint, sources)

        async def may_be(turn: TurnRecord) -> bool:
            if was_said_before(turn, given):
                return False
            if least is not None and (await self._effect(hint, turn) or 0.0) < least:
                return False
            return turn.turn_id in sources or not by_judge or bool(await self._applies(hint, turn))

        found: list[TurnRecord] = []
        for begin in range(0, len(turns), wanted):
            part = turns[begin : begin + wanted]
            said = await all_or_none([may_be(turn) for turn in part])
            likely = [turn for turn, is_one in zip(part, said, strict=True) if is_one]
            found += await self._wanted(hint, likely, given)
            if len(found) >= missing:
                break
        return found

    async def _without_objections(self, turns: Sequence[TurnRecord]) -> list[TurnRecord]:
        """Without those whose user objects there. A parent may have been judged since the last
        check.
        """
        ids = {turn.parent_turn_id for turn in turns if turn.parent_turn_id is not None}
        parents = {one.turn_id: one for one in await self._store.load_turns(sorted(ids))}
        return [turn for turn in turns if not answers_objection(turn, parents)]

    async def _least_effect(self, hint: Hint, sources: Sequence[str]) -> float | None:
        """The least that a hint must change at a state, in nats: a part of the most that it changes
        where it was given. If it changes less, there is nothing to practise: the user has already
        asked for it there, or the policy already does it.
        """
        turns = _with_tokens(await self._store.load_turns(sources[:_SOURCES]))
        effects = await all_or_none([self._effect(hint, turn) for turn in turns])
        known = [effect for effect in effects if effect is not None]
        return _LEAST_EFFECT * max(known) if known else None

    async def _effect(self, hint: Hint, turn: TurnRecord) -> float | None:
        key = (hint.hint_id, turn.turn_id)
        if key not in self._effects:
            async with self._limit:
                self._effects[key] = await effect_at(self._desk, turn, hint.text)
            _forget_oldest(self._effects)
        return self._effects[key]

    async def _applies(self, hint: Hint, turn: TurnRecord) -> bool | None:
        return await self._asked("applies", hint, turn, self._questions.applies(hint.text, turn))

    async def _heeds(self, hint: Hint, turn: TurnRecord) -> bool | None:
        """Whether the recorded answer does what the hint asks. If not, and its user accepted it
        silently although the hint was known, that user does not want the hint there.
        """
        asking = self._questions.followed(hint.text, turn.messages, turn.tools, turn.response)
        return await self._asked("heeds", hint, turn, asking)

    async def _asked(
        self, what: str, hint: Hint, turn: TurnRecord, asking: Coroutine[Any, Any, bool | None]
    ) -> bool | None:
        """The answer to a question, asked once."""
        key = (what, hint.hint_id, turn.turn_id)
        if key in self._said:
            asking.close()
            return self._said[key]
        async with self._limit:
            self._said[key] = answer = await asking
        _forget_oldest(self._said)
        return answer

    async def _try_prompts(self, hint: Hint, kind: PromptKind) -> None:
        prompts = await self._store.hint_prompts(hint.hint_id)
        of_kind = [one for one in prompts if one.kind is kind]
        untried = [one for one in of_kind if one.dropped is None and not one.asked]
        if not untried:
            return
        loaded = await self.load(hint)
        turns = loaded.training or loaded.held_back
        if not turns:
            return
        await self._check(untried, turns, self._config.prompt_samples)

    async def _ask_start_of_wishes(self, hint: Hint) -> None:
        """How often the start model does what the texts that measure obedience ask: it is asked
        more often than when they were tested.
        """
        count = self._config.start_samples
        while True:
            loaded = await self.load(hint)
            turns = [*loaded.held_back, *loaded.training]
            # A text that was asked has at least half as many answers, or is dropped.
            wishes = [one for one in loaded.wishes if 2 * one.asked < count]
            if not wishes or not turns:
                return
            await self._check(wishes, turns, count)

    async def _check(
        self, prompts: Sequence[HintPrompt], turns: Sequence[TurnRecord], count: int
    ) -> None:
        """Ask the start model `count` times for each text, and store what it did."""

        async def check(number: int, prompt: HintPrompt) -> None:
            first = number % len(turns)  # texts begin at different states
            found = await check_prompt(
                self._desk,
                self._start,
                self._questions,
                prompt,
                [*turns[first:], *turns[:first]],
                count,
                self._limit,
            )
            await self._store.set_prompt_check(
                prompt.prompt_id,
                asked=found.asked,
                followed=found.followed,
                dropped=found.dropped,
            )
            if found.dropped is not None:
                logger.info("hint %s: a text is not used: %s", prompt.hint_id, found.dropped)

        await all_or_none([check(number, prompt) for number, prompt in enumerate(prompts)])

    async def _gets_more_texts(self, hint: Hint) -> bool:
        """Whether the judge is asked to write more, as it is while it finds new ones."""
        if hint.block is RehearsalBlock.NO_COUNTER_LESSONS:
            return False
        number = len(await self._store.hint_prompts(hint.hint_id))
        if number >= MAX_TEXTS or number == self._num_texts.get(hint.hint_id):
            return False
        self._num_texts[hint.hint_id] = number
        return await self._store.examine_again(hint.hint_id)

    async def _why_no_prompt(self, hint: Hint) -> str:
        prompts = await self._store.hint_prompts(hint.hint_id)
        wishes = [one for one in prompts if one.kind is PromptKind.OPPOSITE]
        dropped = [one.dropped for one in wishes if one.dropped is not None]
        why = f" (the last not used: {dropped[-1]})" if dropped else ""
        return (
            f"{len(wishes) - len(dropped)} of {len(wishes)} open wishes for the opposite are "
            f"usable{why}; one must train and another one must measure obedience"
        )

    async def _block(self, hint: Hint, block: RehearsalBlock | None, detail: str | None) -> None:
        if hint.block is not block:
            logger.info("hint %s: %s", hint.hint_id, detail or "is practised")
            await self._store.set_hint_block(hint.hint_id, block, detail)

    async def is_of_another_kind(self, turn: TurnRecord, hints: Sequence[PreparedHint]) -> bool:
        """Whether none of these hints applies to a state, so that it may be kept as it is."""
        if self._config.state_rule != "judge":
            kind = called_tools(turn) or {""}
            return all(
                kind.isdisjoint(called_tools(state) or {""})
                for one in hints
                for state in (*one.training, *one.held_back)
            )
        for begin in range(0, len(hints), _HINTS_AT_ONCE):
            part = hints[begin : begin + _HINTS_AT_ONCE]
            said = await all_or_none([self._applies(one.hint, turn) for one in part])
            if any(applies is not False for applies in said):
                return False
        return True


def _forget_oldest(known: OrderedDict[Any, Any]) -> None:
    while len(known) > _REMEMBERED:
        known.popitem(last=False)


def _with_tokens(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Those that still have their tokens."""
    return [turn for turn in turns if len(turn.prompt_ids)]
