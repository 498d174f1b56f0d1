"""The examiner: looks at each new hint of the memory once.

    where it came from         an answer that already does what it asks is not a source of it
    near hints of its scope    the same: merged; the opposite: the one that a user's words asked for
                               last holds (the teacher must agree, at the answer it came from)
    hints of other scopes      the opposite: both wait for somebody to decide
    its votes                  no majority asked for it: it is not rehearsed
    a second question          about one answer only: it is not rehearsed
    the user's own words       the teacher finds that they do not change the answer: it waits for a
                               second user
    its exceptions             open wishes for the opposite, wishes about which it says nothing;
                               again if the start model does not do what they ask

All findings about a hint are written in one commit, under its claim. If the judge is unavailable,
it is asked again later; nothing is lost.
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
"""How many of a hint's newest sources have their answers checked."""
SPOKEN_PART = 0.25
"""A user's words express a hint if they have at least this share of its effect on the answer.
Requests that do not mention it hardly ever have a tenth (docs/learning.md).
"""
_CONFIRMED_BY = 2
_PEOPLE = ("user", ROLE)
_REMEMBERED = 4096
"""How many answers of the judge are kept, so that nothing is asked twice."""
_NO_EVIDENCE = Evidence(next_words=(), new_values=frozenset())
_WANTED_WISHES = 8
"""With fewer open wishes for the opposite, the judge writes more: the policy learns so few by
heart.
"""
_WRITING_ROUNDS = 3
_HELD_OUT_OF = 3
"""One in this many open wishes for the opposite is kept out of training."""


class ExaminerStore(Protocol):
    """What the examiner needs from the store."""

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
    """A hint in the form that the claim loop expects."""

    hint: Hint

    @property
    def turn_id(self) -> str:
        """The hint's id."""
        return self.hint.hint_id


class HintClaims:
    """The memory's hints, with the methods by which the claim loop claims turns."""

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
        """Give up a hint that cannot be examined: it is not rehearsed."""
        return await self._store.commit_examination(owner, _not_examined(turn_id, detail))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheck:
    """What a hint must do to the answers that it came from. `fall` asks the teacher by how many
    nats it lowers the log-prob of a token of a turn's answer (None: unknown); it must be `least` or
    more. `part_of_words` asks which part of that the user's own words achieve. Both raise
    ServiceUnavailable.
    """

    fall: Callable[[TurnRecord, str], Awaitable[float | None]]
    least: float
    part_of_words: Callable[[TurnRecord, str, str], Awaitable[float | None]]

    async def left(self, turn: TurnRecord, text: str) -> list[str]:
        """Which of a turn's candidates, `text` included, are left; see `places_left`."""
        candidates = [text, *(other for other in turn.candidates if other != text)]
        falls = [await self.fall(turn, one) for one in candidates]
        return [candidates[place] for place in places_left(falls, self.least)]


class HintExaminer:
    """Examines hints until stopped. `owner` names the claims. Without a `check`, each turn whose
    votes gave a hint counts as a source of it.
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
        """Hints have none: those not examined yet are claimed."""
        return

    async def process(self, claimed: ClaimedHint) -> None:
        """Examine one hint and write what was found. Raises ServiceUnavailable."""
        hint = claimed.hint
        sources = await self._store.hint_sources(hint.hint_id)
        left = await self._refuted(sources)
        if left:
            refuted = [turn_id for turn_id, others in left.items() if not others]
            restated = {turn_id: others for turn_id, others in left.items() if others}
            # Not the hint's text: that may be deleted one day.
            detail = f"hint {hint.hint_id} asks for what the answer already does"
            stays = await self._store.refute_sources(
                self._owner, hint.hint_id, refuted, detail, restated
            )
            logger.info(
                "hint %s: %d sources already do what it asks; %d of them take another vote's hint",
                hint.hint_id,
                len(left),
                len(restated),
            )
            if not stays:
                self._questions.metrics.examined.labels(outcome="refuted").inc()
            return
        found = await self._examine(hint, sources)
        if not await self._store.commit_examination(self._owner, found):
            logger.warning("hint %s: the claim was lost; it is examined again", found.hint_id)
            return
        self._questions.metrics.examined.labels(outcome=_outcome(found)).inc()

    async def give_up(self, claimed: ClaimedHint, error: ServiceUnavailable) -> None:
        """The judge never answered about this hint."""
        found = _not_examined(claimed.hint.hint_id, str(error))
        if await self._store.commit_examination(self._owner, found):
            self._questions.metrics.examined.labels(outcome=_outcome(found)).inc()

    async def _refuted(self, sources: Sequence[HintSource]) -> dict[str, list[str]]:
        """Among the newest sources, the turns whose answers already do what their hint asks, or
        whose votes disagree too much, with their remaining candidates, best first.
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
        """Why a hint is not practised. Such a hint concerns its own answers only: a single mistake
        of the judge, or a one-time wish, ends no rule. `has_texts`: it passed before, and only
        needs more texts.
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
            # The newest source whose words express the hint, or where the teacher cannot tell.
            if await self._is_spoken(hint, source) is not False:
                is_rule = await self._is_rule(hint, source)
                return None if is_rule else RehearsalBlock.NOT_A_RULE
        return await self._why_unconfirmed(hint, with_words)

    async def _why_unconfirmed(
        self, hint: Hint, sources: Sequence[HintSource]
    ) -> RehearsalBlock | None:
        """For a hint that only the judge finds in the words: the words of two sessions must make it
        a rule. Otherwise one misread request would be practised like a wish.
        """
        sessions = {source.session_id: source for source in reversed(sources)}
        rules = [await self._is_rule(hint, source) for source in sessions.values()]
        if sum(one is True for one in rules) >= _CONFIRMED_BY:
            return None
        return RehearsalBlock.UNCONFIRMED if any(rules) else RehearsalBlock.NOT_A_RULE

    async def _is_spoken(self, hint: Hint, source: HintSource) -> bool | None:
        """Whether the teacher finds that the user's words after a source's answer speak against it
        as the hint does; None if there are no such words or it cannot tell. Asked once.
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
        """Whether a source's words make the hint a rule; asked once for each source."""
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
        """In the hint's scope: the hint that says the same; else the opposite hints that were last
        asked for before it, and an opposite rule that was asked for since. What was said last
        holds.

        Each of two opposites speaks against what the other has taught, so a judge that infers a
        wish from an answer alone gives the older one again and again. Words tell them apart: those
        that the teacher finds to express the hint or, without any, those that make it a rule.
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
                    # A hint that no words asked for is not a rule: `_why_no_rule` finds that.
                    newer = other.hint_id
        return None, older, newer

    async def _last_spoken(self, hint: Hint, sources: Sequence[HintSource]) -> float:
        """When, according to the teacher, a user's words last expressed the hint, in unix seconds;
        -inf if none of the newest did.
        """
        for source in sources[:_CHECKED]:
            if source.words and await self._is_spoken(hint, source):
                return source.created_at
        return -math.inf

    async def _last_said(self, hint: Hint, sources: Sequence[HintSource]) -> float:
        """When, according to the judge, a user's words last made the hint a rule, in unix seconds;
        -inf if none of the newest did. A source without words counts without being asked about.
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
        """The judge's answer, unless the teacher contradicts it at the newest answer that the hint
        came from (`origins`): a hint with the same wish also speaks against that answer; its
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
        """New texts in addition to the `known` ones. Each round of writing reads another user's
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
        """The texts that may be shown to a policy: short, without control texts, instructions to
        the pipeline, or anything that must not be stored, and, according to the judge, what was
        asked for.
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
    """When the newest source came, in unix seconds; a hint that lost its sources gives way."""
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
