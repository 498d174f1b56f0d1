"""The store's methods for reports and people: counts, and what became of a turn."""

from __future__ import annotations

from collections.abc import Sequence

from records.names import DropReason, TurnState
from records.queue import scores
from records.reading import browsing, diagnosis, outcomes, summary, whole_turns
from records.reading import queues as reading_queues
from records.reading.browsing import Place, Said, SessionsPage, Wanted
from records.reading.diagnosis import RunFacts, SessionFacts
from records.reading.outcomes import TurnOutcome
from records.reading.queues import Waiting
from records.reading.summary import ExampleTurn, VoteSummary
from records.reading.whole_turns import WholeTurn
from records.search import finding
from records.search.finding import FoundPage
from records.store.base import StoreBase
from records.tables.columns import clean_text
from records.types import Score


class InspectionStore(StoreBase):
    """Reads that no stage of a run depends on."""

    async def counts(self) -> dict[TurnState, int]:
        """Number of turns in each state."""
        return await self.read(summary.counts)

    async def queues(self, scope: str | None) -> dict[TurnState, Waiting]:
        """The turns of a scope (None: of all) that are on their way, by state."""
        return await self.read(reading_queues.queues, scope=scope)

    async def turns_within(self, seconds: float) -> int:
        """Number of turns that were answered in the last `seconds`."""
        return await self.read(summary.turns_since, since=self._clock() - seconds)

    async def scopes_of(self, turn_ids: Sequence[str]) -> dict[str, str]:
        """The scopes of those of these turns that exist."""
        return await self.read(summary.scopes_of, turn_ids=turn_ids)

    async def drops(self) -> dict[DropReason, int]:
        """Number of dropped turns by reason."""
        return await self.read(summary.drops)

    async def judged_share(self) -> float | None:
        """Share of the turns with a next state that the judge has judged; None while it keeps up
        and no turn was let go unjudged.
        """
        return await self.read(summary.judged_share)

    async def num_sessions(self) -> int:
        """Number of sessions, counted anew."""
        return await self.read(summary.num_sessions)

    async def num_judged(self) -> tuple[int, int]:
        """Number of judged turns, and number of those for which the judge accepted a hint."""
        return await self.read(summary.num_judged)

    async def sessions_named(self, session: str) -> list[SessionFacts]:
        """What is known about the sessions with this id or client-given name, turn by turn."""
        return await self.read(diagnosis.sessions_named, session=session)

    async def session_part(
        self, session_id: str, *, after: str | None, limit: int
    ) -> SessionFacts | None:
        """A session with `limit` of its turns after `after`; None if there is none with this id."""
        return await self.read(
            diagnosis.session_part,
            session_id=clean_text(session_id),
            after=None if after is None else clean_text(after),
            limit=limit,
        )

    async def whole_turn(self, turn_id: str) -> tuple[SessionFacts, WholeTurn] | None:
        """A turn with all that was made of it, and its session with only this turn; None if there
        is no such turn.
        """
        return await self.read(whole_turns.whole_turn, turn_id=clean_text(turn_id))

    async def said(self, turn_ids: Sequence[str]) -> dict[str, Said]:
        """What is new in each of these turns."""
        return await self.read(browsing.said, turn_ids=turn_ids)

    async def sessions_page(
        self, scope: str | None, *, wanted: Wanted, after: Place | None, limit: int
    ) -> SessionsPage:
        """Sessions of a scope (None: of all), the newest first."""
        return await self.read(
            browsing.sessions_page, scope=scope, wanted=wanted, after=after, limit=limit
        )

    async def found_page(
        self,
        scope: str | None,
        *,
        wanted: Wanted,
        phrases: Sequence[str],
        after: int | None,
        limit: int,
    ) -> FoundPage:
        """Sessions of a scope (None: of all) with a turn whose text contains all phrases (at least
        one, as `records.search.words.phrases_of` gives them); that of the newest match first.
        """
        return await self.read(
            finding.found_page,
            scope=scope,
            wanted=wanted,
            phrases=phrases,
            after=after,
            limit=limit,
        )

    async def recent_outcomes(self) -> list[TurnOutcome]:
        """What became of the newest turns, oldest first."""
        return await self.read(outcomes.recent_outcomes)

    async def run_facts(self) -> RunFacts:
        """The numbers of turns of the run, by state and drop reason."""
        return await self.read(diagnosis.run_facts)

    async def score_of(self, turn_id: str) -> Score | None:
        """The newest score of a turn."""
        found = await self.read(scores.load_scores, turn_ids=[turn_id])
        return found.get(turn_id)

    async def vote_summary(self) -> VoteSummary:
        """Sums over all votes and verdicts."""
        return await self.read(summary.vote_summary)

    async def mean_score_latency(self) -> float | None:
        """Mean seconds of the teacher's calls that gave a score; None if there are none."""
        return await self.read(summary.mean_score_latency)

    async def newest_taught(self, teacher: str, *, limit: int) -> dict[str, str]:
        """The newest turns that were trained under a hint that `teacher` scored, newest first: id
        -> that hint.
        """
        return await self.read(summary.newest_taught, teacher=teacher, limit=limit)

    async def example_turns(
        self, limit: int, *, one_per_version: bool = False
    ) -> list[ExampleTurn]:
        """The newest trained turns with verdict, score and sample."""
        return await self.read(summary.example_turns, limit=limit, one_per_version=one_per_version)

    async def hinted_turn_ids(self) -> list[str]:
        """The turns of main conversations that earned a hint, oldest first."""
        return await self.read(summary.hinted_turn_ids)
