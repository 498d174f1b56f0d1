"""The examiner: looks at each new hint of the memory once.

    where it came from         an answer that does what it asks gave no such hint: it is no source
    near hints of its scope    the same: merged; the opposite: the one that a user's words asked for
                               last holds (the teacher has to agree, by that answer)
    hints of other scopes      the opposite: both wait for somebody to decide
    its votes                  no majority asked for it: it is not rehearsed
    a second question          about one answer only: it is not rehearsed
    the user's own words       they change nothing of the answer, says the teacher: it waits for a
                               second user
    its exceptions             open wishes for the opposite, wishes of which it says nothing;
                               once more where the start model does not do what they ask

What is found is written at once, with the hint's claim. A hint whose judge stays away is asked
about again later; nothing is lost by that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from judge.config import JudgeConfig
from judge.hints.questions import HintQuestions, Relation
from judge.votes.screening import Evidence, rejection
from records.feedback.feedback import ROLE
from records.hints.memory import words_of
from records.hints.types import (
    Examination,
    Hint,
    HintPrompt,
    HintSource,
    PromptKind,
    RehearsalBlock,
)
from records.names import DropReason
from records.privacy.redaction import Redactor
from records.types import TurnRecord
from rollout_bridge.scoring.scoring import places_left
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

logger = logging.getLogger(__name__)

_NEAR = 4
_CHECKED = 8
"""Sources of a hint whose answers are looked at, the newest."""
SPOKEN_PART = 0.25
"""A user's words speak of a hint if they do so much of what it does to the answer. Of requests that
say nothing of it hardly any do a tenth (docs/learning.md).
"""
_CONFIRMED_BY = 2
_PEOPLE = ("user", ROLE)
_REMEMBERED = 4096
"""Answers of the judge that are kept, so that nothing is asked twice."""
_NO_EVIDENCE = Evidence(next_words=(), new_values=frozenset())
_WANTED_WISHES = 8
"""With fewer open wishes for the opposite the judge writes once more: few are learned by heart."""
_WRITING_ROUNDS = 3
_HELD_OUT_OF = 3
"""Of so many open wishes for the opposite one is kept out of training."""


class ExaminerStore(Protocol):
    """What the examiner needs of the store."""

    @property
    def redactor(self) -> Redactor: ...
    async def redact(self, work: Any, *args: Any) -> Any: ...
    async def claim_hints(self, *, owner: str, limit: int, ttl_s: float) -> list[Hint]: ...
    async def extend_hint_claims(
        self, owner: str, hint_ids: Sequence[str], ttl_s: float
    ) -> object: ...
    async def release_hints(self, owner: str, hint_ids: Sequence[str]) -> object: ...
    async def hint_sources(self, hint_id: str, limit: int = 100) -> list[HintSource]: ...
    async def hint_prompts(self, hint_id: str) -> list[HintPrompt]: ...
    async def near_hints(
        self, hint: Hint, *, limit: int = 4, other_scopes: bool = False
    ) -> list[Hint]: ...
    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]: ...
    async def refute_sources(
        self,
        owner: str,
        hint_id: str,
        turn_ids: Sequence[str],
        detail: str,
        restated: Mapping[str, Sequence[str]],
    ) -> bool: ...
    async def commit_examination(self, owner: str, examination: Examination) -> bool: ...


@dataclass(frozen=True, slots=True)
class ClaimedHint:
    """A hint, as the claim loop knows what it claimed."""

    hint: Hint

    @property
    def turn_id(self) -> str:
        """The hint's id."""
        return self.hint.hint_id


class HintClaims:
    """The memory's hints under the names by which the claim loop asks for turns."""

    def __init__(self, store: ExaminerStore) -> None:
        self._store = store

    async def claim(self, state: None, *, owner: str, limit: int, ttl_s: float):
        """Claim up to `limit` hints that nobody has examined."""
        found = await self._store.claim_hints(owner=owner, limit=limit, ttl_s=ttl_s)
        return [ClaimedHint(hint) for hint in found]

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> object:
        """Hold claims for longer."""
        return await self._store.extend_hint_claims(owner, turn_ids, ttl_s)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> object:
        """Give claims back."""
        return await self._store.release_hints(owner, turn_ids)

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """A hint that cannot be examined: it is not rehearsed."""
        return await self._store.commit_examination(owner, _not_examined(turn_id, detail))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheck:
    """What a hint must do where it came from: `fall` asks the teacher by how many nats it lowers
    the log-prob of a token of a turn's answer (None: that cannot be said), and `least` is asked
    for. `part_of_words` asks which part of that the user's own words do. Both raise
    ServiceUnavailable.
    """

    fall: Callable[[TurnRecord, str], Awaitable[float | None]]
    least: float
    part_of_words: Callable[[TurnRecord, str, str], Awaitable[float | None]]

    async def left(self, turn: TurnRecord, text: str) -> list[str]:
        """What is left of a turn's candidates, `text` among them; see `places_left`."""
        candidates = [text, *(other for other in turn.candidates if other != text)]
        falls = [await self.fall(turn, one) for one in candidates]
        return [candidates[place] for place in places_left(falls, self.least)]


class HintExaminer:
    """Examines hints until stopped. `owner` names the claims. Without a `check` each turn whose
    votes gave a hint is a source of it.
    """

    def __init__(
        self,
        store: ExaminerStore,
        questions: HintQuestions,
        config: JudgeConfig,
        owner: str,
        *,
        check: SourceCheck | None = None,
    ) -> None:
        self._store, self._questions = store, questions
        self._config, self._owner = config, owner
        self._check = check
        self._rules: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._spoken: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self.loop = ClaimLoop(HintClaims(store), self, owner=owner, config=config.loop)

    @property
    def state(self) -> None:
        """Hints are claimed by what is not known of them yet."""
        return

    async def process(self, claimed: ClaimedHint) -> None:
        """Examine one hint and write what was found. Raises ServiceUnavailable."""
        hint = claimed.hint
        sources = await self._store.hint_sources(hint.hint_id)
        left = await self._refuted(sources)
        if left:
            refuted = [turn_id for turn_id, others in left.items() if not others]
            restated = {turn_id: others for turn_id, others in left.items() if others}
            # Without its text, which may be deleted one day.
            detail = f"hint {hint.hint_id} asks for what the answer does"
            stays = await self._store.refute_sources(
                self._owner, hint.hint_id, refuted, detail, restated
            )
            logger.info(
                "hint %s: %d sources do what it asks, of %d another vote's hint is taken",
                hint.hint_id,
                len(left),
                len(restated),
            )
            if not stays:
                self._questions.metrics.examined.labels(outcome="refuted").inc()
            return
        found = await self._examine(hint, sources)
        if not await self._store.commit_examination(self._owner, found):
            logger.warning("hint %s: the claim was lost, it is examined again", found.hint_id)
            return
        self._questions.metrics.examined.labels(outcome=_outcome(found)).inc()

    async def give_up(self, claimed: ClaimedHint, error: ServiceUnavailable) -> None:
        """The judge never answered about this hint."""
        found = _not_examined(claimed.hint.hint_id, str(error))
        if await self._store.commit_examination(self._owner, found):
            self._questions.metrics.examined.labels(outcome=_outcome(found)).inc()

    async def _refuted(self, sources: Sequence[HintSource]) -> dict[str, list[str]]:
        """Turns of the newest sources whose answers do what their hint asks, or whose votes ask for
        too different things, and what is left of their candidates, the best first.
        """
        check = self._check
        if check is None:
            return {}
        texts = {one.turn_id: one.text for one in sources[:_CHECKED]}
        left: dict[str, list[str]] = {}
        for turn in await self._store.load_turns(list(texts)):
            text = texts[turn.turn_id]
            others = await check.left(turn, text)
            if text not in others:
                left[turn.turn_id] = others
        return left

    async def _examine(self, hint: Hint, sources: Sequence[HintSource]) -> Examination:
        origins = await self._store.load_turns([source.turn_id for source in sources[:1]])
        known = await self._store.hint_prompts(hint.hint_id)
        same, older, newer = await self._compared(hint, sources, origins, was_rule=bool(known))
        if same is not None:
            return Examination(hint_id=hint.hint_id, merged_into=same)
        if newer is not None:
            return Examination(hint_id=hint.hint_id, contradicted_by=newer)
        block = await self._why_no_rule(hint, sources, has_texts=bool(known))
        if block is not None:
            return Examination(hint_id=hint.hint_id, block=block)
        elsewhere = await self._store.near_hints(hint, limit=_NEAR, other_scopes=True)
        opposed = [
            other.hint_id
            for other in elsewhere
            if await self._relation(hint, origins, other) is Relation.OPPOSITE
        ]
        return Examination(
            hint_id=hint.hint_id,
            is_rule=True,
            contradicts=tuple(older),
            opposed_elsewhere=tuple(opposed),
            prompts=await self._texts(hint, sources, known),
        )

    async def _why_no_rule(
        self, hint: Hint, sources: Sequence[HintSource], *, has_texts: bool
    ) -> RehearsalBlock | None:
        """Why a hint is not practised. Such a one speaks of its own answers alone: a single slip of
        the judge, or what a user wants once, ends no rule. `has_texts`: it passed before, and more
        of them are wanted.
        """
        if not _has_majority(sources):
            return RehearsalBlock.NO_MAJORITY
        if has_texts:
            return None
        with_words = [source for source in sources[:_CHECKED] if source.words]
        if not with_words:
            is_rule = await self._questions.is_rule(hint.text, "")
            return None if is_rule else RehearsalBlock.NOT_A_RULE
        for source in with_words:
            # The newest whose words speak of it, or of which that cannot be said.
            if await self._is_spoken(hint, source) is not False:
                is_rule = await self._is_rule(hint, source)
                return None if is_rule else RehearsalBlock.NOT_A_RULE
        return await self._why_unconfirmed(hint, with_words)

    async def _why_unconfirmed(
        self, hint: Hint, sources: Sequence[HintSource]
    ) -> RehearsalBlock | None:
        """Of a hint that the judge alone reads out of what was said: words of two sessions have to
        make it a rule. One request that it misreads would else be practised like a wish.
        """
        sessions = {source.session_id: source for source in reversed(sources)}
        rules = [await self._is_rule(hint, source) for source in sessions.values()]
        if sum(one is True for one in rules) >= _CONFIRMED_BY:
            return None
        return RehearsalBlock.UNCONFIRMED if any(rules) else RehearsalBlock.NOT_A_RULE

    async def _is_spoken(self, hint: Hint, source: HintSource) -> bool | None:
        """Whether what the user said after a source's answer speaks against it as the hint does,
        says the teacher; None where there are no such words, or where it cannot say. Asked once.
        """
        if self._check is None:
            return None
        key = (hint.hint_id, source.turn_id)
        if key not in self._spoken:
            self._spoken[key] = await self._asked_if_spoken(self._check, hint, source)
            if len(self._spoken) > _REMEMBERED:
                self._spoken.popitem(last=False)
        return self._spoken[key]

    async def _asked_if_spoken(
        self, check: SourceCheck, hint: Hint, source: HintSource
    ) -> bool | None:
        turns = await self._store.load_turns([source.turn_id])
        said = [one for turn in turns for one in turn.next_state if one["role"] in _PEOPLE]
        words = words_of(said)
        if not words:
            return None
        part = await check.part_of_words(turns[0], hint.text, words)
        return None if part is None else part >= SPOKEN_PART

    async def _is_rule(self, hint: Hint, source: HintSource) -> bool | None:
        """Whether a source's words make the hint a rule; asked once of each."""
        key = (hint.hint_id, source.turn_id)
        if key not in self._rules:
            self._rules[key] = await self._questions.is_rule(hint.text, source.words)
            if len(self._rules) > _REMEMBERED:
                self._rules.popitem(last=False)
        return self._rules[key]

    async def _compared(
        self,
        hint: Hint,
        sources: Sequence[HintSource],
        origins: Sequence[TurnRecord],
        *,
        was_rule: bool,
    ) -> tuple[str | None, list[str], str | None]:
        """Of its scope: the hint that says the same; or else those that say the opposite and were
        last asked for before it, and a rule that was asked for since. What was said last holds.

        Of two opposites each speaks against what the other has taught, so a judge that reads a
        wish out of an answer alone gives the older one again and again. Words tell them apart:
        those that speak of the hint, says the teacher; without any, those that make it a rule.
        """
        older: list[str] = []
        newer = None
        for other in await self._store.near_hints(hint, limit=_NEAR):
            relation = await self._relation(hint, origins, other)
            if relation is Relation.SAME:
                return other.hint_id, [], None
            if relation is Relation.OPPOSITE:
                theirs = await self._store.hint_sources(other.hint_id)
                spoken = await self._last_spoken(hint, sources)
                said, said_of_other = spoken, await self._last_spoken(other, theirs)
                is_spoken = max(said, said_of_other) > -math.inf
                if not is_spoken:
                    said = await self._last_said(hint, sources)
                    said_of_other = await self._last_said(other, theirs)
                if said == said_of_other == -math.inf:
                    said, said_of_other = _last_asked(sources), _last_asked(theirs)
                if said_of_other <= said:
                    older.append(other.hint_id)
                elif other.is_rule and (was_rule or is_spoken or said > -math.inf):
                    # One that no words asked for is no rule, which is said below.
                    newer = other.hint_id
        return None, older, newer

    async def _last_spoken(self, hint: Hint, sources: Sequence[HintSource]) -> float:
        """When a user's words last spoke of the hint, says the teacher, in unix seconds; -inf where
        none of the newest did.
        """
        for source in sources[:_CHECKED]:
            if source.words and await self._is_spoken(hint, source):
                return source.created_at
        return -math.inf

    async def _last_said(self, hint: Hint, sources: Sequence[HintSource]) -> float:
        """When a user's words last made the hint a rule, says the judge, in unix seconds; -inf
        where none of the newest did. A source without words counts as it is.
        """
        asked: set[str] = set()
        for source in sources[:_CHECKED]:
            if not source.words:
                return source.created_at
            if source.words in asked:
                continue
            asked.add(source.words)
            if await self._is_rule(hint, source):
                return source.created_at
        return -math.inf

    async def _relation(
        self, hint: Hint, origins: Sequence[TurnRecord], other: Hint
    ) -> Relation | None:
        """What the judge says, unless the teacher says otherwise of the newest answer that the hint
        came from (`origins`): a hint that asks for the same speaks against it, too, and the
        opposite does not.
        """
        relation = await self._questions.relation(hint.text, other.text)
        if self._check is None or relation not in (Relation.SAME, Relation.OPPOSITE):
            return relation
        for turn in origins:
            fall = await self._check.fall(turn, other.text)
            if fall is not None and (fall >= self._check.least) is not (relation is Relation.SAME):
                logger.info("hint %s is not the %s of %s", hint.hint_id, relation, other.hint_id)
                return Relation.UNRELATED
        return relation

    async def _texts(
        self, hint: Hint, sources: Sequence[HintSource], known: Sequence[HintPrompt]
    ) -> tuple[HintPrompt, ...]:
        """New texts beside those that are `known`. Each round of writing reads another user's
        words.
        """
        said = [source.words for source in sources if source.words] or [""]
        have = {one.text for one in known}
        wishes: dict[str, None] = {}
        for number in range(_WRITING_ROUNDS):
            written = await self._questions.opposites(hint.text, said[number % len(said)])
            new = [text for text in written if text not in wishes and text not in have]
            wishes |= dict.fromkeys(await self._usable(hint, Relation.OPPOSITE, new))
            if len(wishes) >= _WANTED_WISHES:
                break
        others = [] if known else await self._outsides(hint, sources)
        return (
            *(
                _prompt(hint, PromptKind.OPPOSITE, text, held_out=at % _HELD_OUT_OF == 1)
                for at, text in enumerate(wishes)
            ),
            *(_prompt(hint, PromptKind.OUTSIDE, text, held_out=False) for text in others),
        )

    async def _outsides(self, hint: Hint, sources: Sequence[HintSource]) -> list[str]:
        turns = await self._store.load_turns([source.turn_id for source in sources[:1]])
        tools = turns[0].tools if turns else []
        written = await self._questions.outsides(hint.text, tools)
        return await self._usable(hint, Relation.UNRELATED, written)

    async def _usable(self, hint: Hint, wanted: Relation, texts: Sequence[str]) -> list[str]:
        """Those that may be said to a policy: short, without control texts, instructions to the
        pipeline, or anything that is not to be stored; and, says the judge, what was asked for.
        """
        at_once = asyncio.Semaphore(self._config.loop.concurrency)

        async def refused(text: str) -> str | None:
            async with at_once:
                return await self._why_refused(hint, wanted, text)

        reasons = await asyncio.gather(*(refused(text) for text in texts))
        for reason in reasons:
            if reason is not None:
                self._questions.metrics.refused_texts.labels(reason=reason).inc()
        return [text for text, reason in zip(texts, reasons, strict=True) if reason is None]

    async def _why_refused(self, hint: Hint, wanted: Relation, text: str) -> str | None:
        refused = rejection(text, _NO_EVIDENCE, self._config)
        if refused is not None:
            return refused.value
        message = {"role": "user", "content": text}
        [clean] = await self._store.redact(self._store.redactor.messages, [message])
        if clean is not message:
            return DropReason.SENSITIVE.value
        relation = await self._questions.relation(hint.text, text)
        return None if relation is wanted else f"not_{wanted.value}"


def _last_asked(sources: Sequence[HintSource]) -> float:
    """When a user last gave the hint, in unix seconds; a hint that lost its sources gives way."""
    return max((source.created_at for source in sources), default=-math.inf)


def _has_majority(sources: Sequence[HintSource]) -> bool:
    """Whether more than half of the votes on some turn asked for the hint."""
    return any(2 * source.num_positive > source.num_votes for source in sources)


def _prompt(hint: Hint, kind: PromptKind, text: str, *, held_out: bool) -> HintPrompt:
    return HintPrompt(
        prompt_id=uuid4().hex,
        hint_id=hint.hint_id,
        kind=kind,
        text=text,
        held_out=held_out,
        asked=0,
        followed=0,
        dropped=None,
    )


def _not_examined(hint_id: str, detail: str) -> Examination:
    return Examination(hint_id=hint_id, block=RehearsalBlock.NOT_EXAMINED, detail=detail)


def _outcome(found: Examination) -> str:
    if found.merged_into is not None:
        return "merged"
    if found.contradicted_by is not None:
        return "contradicted"
    if found.opposed_elsewhere:
        return RehearsalBlock.OTHER_SCOPE.value
    return "rule" if found.block is None else found.block.value
