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

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from judge.config import JudgeConfig
from judge.hints.claims import ClaimedHint, ClaimStore, HintClaims, not_examined
from judge.hints.questions import HintQuestions, Relation
from judge.hints.said import CHECKED, SourceCheck, UserWords
from judge.hints.texts import TextWriter, WriterStore
from records.hints.memory import MOST_ASKED
from records.hints.types import Examination, Hint, HintPrompt, HintSource, RehearsalBlock
from records.types import TurnRecord
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

logger = logging.getLogger(__name__)

_NEAR = 4
_CONFIRMED_BY = 2


class ExaminerStore(ClaimStore, WriterStore, Protocol):
    """What the examiner needs from the store."""

    async def hint_sources(self, hint_id: str, limit: int = 100) -> list[HintSource]: ...
    async def hint_sessions(self, hint_id: str, limit: int) -> list[HintSource]: ...
    async def hint_prompts(self, hint_id: str) -> list[HintPrompt]: ...
    async def near_hints(
        self, hint: Hint, *, limit: int = 4, other_scopes: bool = False
    ) -> list[Hint]: ...
    async def refute_sources(
        self,
        owner: str,
        hint_id: str,
        turn_ids: Sequence[str],
        detail: str,
        restated: Mapping[str, Sequence[str]],
    ) -> bool: ...


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
        self._owner = owner
        self._check = check
        self._words = UserWords(store, questions, check)
        self._writer = TextWriter(store, questions, config)
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
        found = not_examined(claimed.hint.hint_id, str(error))
        if await self._store.commit_examination(self._owner, found):
            self._questions.metrics.examined.labels(outcome=_outcome(found)).inc()

    async def _refuted(self, sources: Sequence[HintSource]) -> dict[str, list[str]]:
        """Among the newest sources, the turns whose answers already do what their hint asks, or
        whose votes disagree too much, with their remaining candidates, best first.
        """
        check = self._check
        if check is None:
            return {}
        texts = {one.turn_id: one.text for one in sources[:CHECKED]}
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
        sessions = await self._store.hint_sessions(hint.hint_id, MOST_ASKED)
        block = await self._why_no_rule(hint, sources, sessions, has_texts=bool(known))
        if block is not None:
            return Examination(hint_id=hint.hint_id, block=block, num_sessions=len(sessions))
        elsewhere = await self._store.near_hints(hint, limit=_NEAR, other_scopes=True)
        opposed = [
            other.hint_id
            for other in elsewhere
            if await self._relation(hint, origins, other) is Relation.OPPOSITE
        ]
        return Examination(
            hint_id=hint.hint_id,
            is_rule=True,
            num_sessions=len(sessions),
            contradicts=tuple(older),
            opposed_elsewhere=tuple(opposed),
            prompts=await self._writer.texts(hint, sources, known),
        )

    async def _why_no_rule(
        self,
        hint: Hint,
        sources: Sequence[HintSource],
        sessions: Sequence[HintSource],
        *,
        has_texts: bool,
    ) -> RehearsalBlock | None:
        """Why a hint is not practised. Such a hint concerns its own answers only: a single mistake
        of the judge, or a one-time wish, ends no rule. `sessions` are sources of different ones;
        `has_texts`: it passed before, and only needs more texts.
        """
        if not _has_majority(sources):
            return RehearsalBlock.NO_MAJORITY
        if has_texts:
            return None
        with_words = [source for source in sessions if source.words]
        if not with_words:
            is_rule = await self._questions.is_rule(hint.text, "")
            return None if is_rule else RehearsalBlock.NOT_A_RULE
        is_said = False
        for source in with_words:
            # The words express the hint, or the teacher cannot tell.
            if await self._words.is_spoken(hint, source) is not False:
                is_said = True
                if await self._words.is_rule(hint, source):
                    return None
        if is_said:
            return RehearsalBlock.NOT_A_RULE
        return await self._why_unconfirmed(hint, with_words)

    async def _why_unconfirmed(
        self, hint: Hint, sources: Sequence[HintSource]
    ) -> RehearsalBlock | None:
        """For a hint that only the judge finds in the words: the words of two sessions must make it
        a rule. Otherwise one misread request would be practised like a wish.
        """
        rules = [await self._words.is_rule(hint, source) for source in sources]
        if sum(one is True for one in rules) >= _CONFIRMED_BY:
            return None
        return RehearsalBlock.UNCONFIRMED if any(rules) else RehearsalBlock.NOT_A_RULE

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
                spoken = await self._words.last_spoken(hint, sources)
                said, said_of_other = spoken, await self._words.last_spoken(other, theirs)
                is_spoken = max(said, said_of_other) > -math.inf
                if not is_spoken:
                    said = await self._words.last_said(hint, sources)
                    said_of_other = await self._words.last_said(other, theirs)
                if said == said_of_other == -math.inf:
                    said, said_of_other = _last_asked(sources), _last_asked(theirs)
                if said_of_other <= said:
                    older.append(other.hint_id)
                elif other.is_rule and (was_rule or is_spoken or said > -math.inf):
                    # A hint that no words asked for is not a rule: `_why_no_rule` finds that.
                    newer = other.hint_id
        return None, older, newer

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


def _last_asked(sources: Sequence[HintSource]) -> float:
    """When the newest source came, in unix seconds; a hint that lost its sources gives way."""
    return max((source.created_at for source in sources), default=-math.inf)


def _has_majority(sources: Sequence[HintSource]) -> bool:
    """Whether more than half of the votes on some turn asked for the hint."""
    return any(2 * source.num_positive > source.num_votes for source in sources)


def _outcome(found: Examination) -> str:
    if found.merged_into is not None:
        return "merged"
    if found.contradicted_by is not None:
        return "contradicted"
    if found.opposed_elsewhere:
        return RehearsalBlock.OTHER_SCOPE.value
    return "rule" if found.block is None else found.block.value
