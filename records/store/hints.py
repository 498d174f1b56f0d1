"""The store's methods for the hint memory's readers and the rehearsal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from records.feedback import reviews
from records.feedback.reviews import HintDecision, HintReview, Proposal
from records.hints import changes, ending, reading
from records.hints.types import (
    DeletedHint,
    Examination,
    Hint,
    HintPrompt,
    HintSource,
    HintState,
    HintStatus,
    RehearsalBlock,
)
from records.names import ReviewDecision
from records.store.base import StoreBase
from records.tables import loading
from records.types import TurnRecord


class HintStore(StoreBase):
    """Hints, where they came from, and what is made from them. Times are unix seconds."""

    async def hints(
        self,
        *,
        scope: str | None = None,
        statuses: Sequence[HintStatus] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Hint]:
        """Hints of a scope (None: of all), newest first, starting after the hint `after`."""
        return await self.read(
            reading.hints, scope=scope, statuses=statuses, limit=limit, after=after
        )

    async def hint(self, hint_id: str) -> Hint | None:
        """One hint; None if there is none with this id."""
        found = await self.read(reading.by_ids, hint_ids=[hint_id])
        return found[0] if found else None

    async def hint_sources(self, hint_id: str, limit: int = 100) -> list[HintSource]:
        """The turns that it came from, newest first."""
        return await self.read(reading.sources, hint_id=hint_id, limit=limit)

    async def hint_sessions(self, hint_id: str, limit: int) -> list[HintSource]:
        """One source of each session that gave it, newest first, with words if it has any."""
        return await self.read(reading.of_each_session, hint_id=hint_id, limit=limit)

    async def newest_words(self, hint_ids: Sequence[str]) -> dict[str, str]:
        """The newest words that each of these hints came from."""
        return await self.read(reading.newest_words, hint_ids=hint_ids)

    async def hint_prompts(self, hint_id: str) -> list[HintPrompt]:
        """The words that were written for its counter-lessons."""
        return await self.read(reading.prompts, hint_id=hint_id)

    async def taught_at(self, hint_id: str) -> list[str]:
        """Turns at which a hint taught: its states and sources, if they may serve as states."""
        return await self.read(reading.taught_at, hint_id)

    async def hint_states(self, hint_id: str) -> list[HintState]:
        """The states at which it is rehearsed and measured."""
        return await self.read(reading.states, hint_id=hint_id)

    async def claim_hints(self, *, owner: str, limit: int, ttl_s: float) -> list[Hint]:
        """Claim unexamined hints, one per scope: the one with the most sources."""
        hint_ids = await self.write(
            changes.claim_hints_op, owner=owner, limit=limit, now=self._clock(), ttl_s=ttl_s
        )
        return await self.read(reading.by_ids, hint_ids=hint_ids)

    async def extend_hint_claims(self, owner: str, hint_ids: Sequence[str], ttl_s: float) -> int:
        """Hold claims for another `ttl_s` from now; returns how many are still the owner's."""
        until = self._clock() + ttl_s
        return await self.write(
            changes.extend_hint_claims_op, owner=owner, hint_ids=hint_ids, until=until
        )

    async def release_hints(self, owner: str, hint_ids: Sequence[str]) -> int:
        """Give claims back; returns how many were still the owner's."""
        return await self.write(changes.release_hints_op, owner=owner, hint_ids=hint_ids)

    async def near_hints(
        self, hint: Hint, *, limit: int = 4, other_scopes: bool = False
    ) -> list[Hint]:
        """Hints that hold, with the words most like its own, of its scope or of all others."""
        return await self.read(
            reading.near,
            hint_id=hint.hint_id,
            scope=hint.scope,
            text=hint.text,
            limit=limit,
            other_scopes=other_scopes,
        )

    async def commit_examination(self, owner: str, examination: Examination) -> bool:
        """Store what the judge found about a hint; False, and nothing is written, if the claim is
        lost, or if the hint that it equals no longer holds.
        """
        ended = await self.write(
            changes.examination_op, owner=owner, examination=examination, now=self._clock()
        )
        return ended is not None

    async def refute_sources(
        self,
        owner: str,
        hint_id: str,
        turn_ids: Sequence[str],
        detail: str,
        restated: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> bool:
        """Remove these turns from a claimed hint's sources: their answers do what it asks. The same
        goes for those of `restated`, but they become sources of their first remaining hint. False
        if this ended the hint, or the claim is lost; otherwise it is examined again.
        """
        return await self.write(
            changes.refute_op,
            owner=owner,
            hint_id=hint_id,
            turn_ids=turn_ids,
            detail=detail,
            restated=restated,
            now=self._clock(),
        )

    async def drop_unguarded(self) -> int:
        """Drop ready turns with a hint that several sessions gave and that is not practised;
        returns how many, of very many some at a time.
        """
        if not await self.read(ending.any_unguarded):
            return 0
        return await self.write(ending.drop_unguarded_op, now=self._clock())

    async def active_hints(self, limit: int) -> list[Hint]:
        """Rules that hold, newest first: what is rehearsed, and what is measured."""
        return await self.read(reading.to_rehearse, limit=limit)

    async def is_practising(self) -> bool:
        """Whether any hint is practised or resting, and was measured: then each version is
        measured.
        """
        return await self.read(reading.is_practising)

    async def hint_counts(self) -> dict[tuple[HintStatus, RehearsalBlock | None], int]:
        """Number of hints by status and by why they are not rehearsed (None: they are, or are
        still to be examined).
        """
        return await self.read(reading.counts)

    async def hint_rules(self) -> dict[bool | None, int]:
        """Number of hints that are rules to the judge, that are not, or that it was not yet asked
        about.
        """
        return await self.read(reading.rules)

    async def hints_of_ready_turns(self) -> set[str]:
        """Hints given by turns that wait to be trained on."""
        return await self.read(reading.of_ready_turns)

    async def states_near(self, hint_id: str, *, rule: str, limit: int) -> list[str]:
        """Turns of its scope at which it may be rehearsed, the likeliest first; `rule` is "tools"
        or "near".
        """
        return await self.read(reading.states_near, hint_id=hint_id, rule=rule, limit=limit)

    async def keep_states(self, *, exclude_hints: Sequence[str], limit: int) -> list[str]:
        """Turns of every consenting scope at which none of these hints is rehearsed."""
        return await self.read(reading.keep_states, exclude_hints=exclude_hints, limit=limit)

    async def accepted_turns(self, turn_ids: Sequence[str]) -> set[str]:
        """Those of these turns whose answer was accepted: judged, and no hint."""
        return await self.read(reading.accepted, turn_ids=turn_ids)

    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        """Those of these turns that exist, in the same order."""
        return await self.read(loading.load_turns, turn_ids=turn_ids, skip_unknown=True)

    async def set_hint_states(self, hint_id: str, states: Sequence[HintState]) -> None:
        """Replace its states."""
        await self.write(changes.set_states_op, hint_id=hint_id, states=states)

    async def examine_again(self, hint_id: str) -> bool:
        """Have the judge write further texts for the exceptions of a rule; False if it no longer
        holds, or already waits for its examination.
        """
        return await self.write(changes.examine_again_op, hint_id=hint_id, now=self._clock())

    async def settle_prompts(self, hint_id: str, measuring: Sequence[str]) -> None:
        """Set which of its texts measure from now on, by their ids; the others train, and never
        measure again.
        """
        await self.write(changes.settle_prompts_op, hint_id=hint_id, measuring=list(measuring))

    async def set_prompt_check(
        self, prompt_id: str, *, asked: int, followed: int, dropped: str | None
    ) -> None:
        """Store how the start model followed these words, and why they are not used."""
        await self.write(
            changes.set_prompt_op,
            prompt_id=prompt_id,
            asked=asked,
            followed=followed,
            dropped=dropped,
        )

    async def set_hint_block(
        self, hint_id: str, block: RehearsalBlock | None, detail: str | None
    ) -> None:
        """Set why a hint is not rehearsed; None: it is."""
        await self.write(
            changes.set_block_op, hint_id=hint_id, block=block, detail=detail, now=self._clock()
        )

    async def set_hint_gap(self, hint_id: str, *, gap: float, gap_high: float, first: bool) -> None:
        """Store a measurement on held-back states, in nats per token; `first`: before lessons."""
        await self.write(
            changes.set_gap_op,
            hint_id=hint_id,
            gap=gap,
            gap_high=gap_high,
            first=first,
            now=self._clock(),
        )

    async def set_hint_status(self, hint_id: str, status: HintStatus, detail: str | None) -> bool:
        """Set another status; False if the hint no longer holds or has it. Raises StoreConflict."""
        return await self.write(
            changes.set_status_op, hint_id=hint_id, status=status, detail=detail, now=self._clock()
        )

    async def proposals(
        self, *, scope: str | None = None, limit: int = 20, after: str | None = None
    ) -> list[Proposal]:
        """Hints that wait for a person, those of the newest turns first, starting after the turn
        `after`.
        """
        return await self.read(reviews.proposals, scope=scope, limit=limit, after=after)

    async def review(self, decided: HintDecision, scope: str | None = None) -> HintReview | None:
        """Approve or reject a turn's hint. None if there is no such turn.

        Raises StoreConflict for a turn that does not wait for a review, or was judged again since.
        """
        return await self.write(reviews.review_op, decided=decided, scope=scope, now=self._clock())

    async def review_of(self, turn_id: str) -> HintReview | None:
        """What a person decided on a turn's hint; None if nobody did."""
        return await self.read(reviews.review_of, turn_id=turn_id)

    async def review_decisions(self, scope: str | None = None) -> dict[ReviewDecision, int]:
        """How often people made each decision, on the hints of a scope (None: of all)."""
        return await self.read(reviews.decisions, scope=scope)

    async def delete_hint(self, hint_id: str, scope: str | None = None) -> DeletedHint | None:
        """Delete a hint, of this scope if one is given; None if there is no such hint."""
        return await self.write(
            ending.delete_hint_op, hint_id=hint_id, scope=scope, now=self._clock()
        )
