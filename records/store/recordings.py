"""The store's methods for recorded sessions: what a replay imports, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from records.care import deletion
from records.errors import UnknownTurn
from records.reading import replay_status, replaying
from records.reading.replay_status import RecordedHint, ReplayStatus
from records.reading.replaying import ImportedSession, PreparedSession
from records.store.base import StoreBase
from records.tables import loading
from records.training.history import sessions
from records.turns import turn_writes as turns
from records.types import CapturedTurn


class RecordingStore(StoreBase):
    """Recorded sessions."""

    async def import_session(self, session: PreparedSession) -> ImportedSession:
        """Store what is not yet there of a recorded session."""
        return await self.writer.run_bulk(replaying.import_op, session, "import_session")

    async def is_deleted(self, session_id: str) -> bool:
        """Whether a session of this id was deleted: nothing of it is written again."""
        return await self.read(deletion.is_deleted, session_id=session_id)

    async def import_votes(self, turn_id: str, votes: Sequence[str]) -> bool:
        """Give a recorded turn its judge's answers; False if it is unknown, has them or went on."""
        imported = replaying.ImportedVotes(turn_id=turn_id, votes=tuple(votes), now=self._clock())
        return await self.writer.run_bulk(replaying.votes_op, imported, "import_votes")

    async def replay_status(self) -> ReplayStatus:
        """Where the recorded turns stand."""
        return await self.read(replay_status.replay_status)

    async def recorded_turns(self, scope: str, name: str) -> dict[int, list[str]]:
        """Position -> turn ids of the recorded session `name`, several if recordings with this name
        differ; empty if there is none.
        """
        return await self.read(replay_status.recorded_turns, scope=scope, name=name)

    async def recorded_hints(self, limit: int) -> list[RecordedHint]:
        """The hints of the first `limit` recorded turns that earned one."""
        return await self.read(replay_status.recorded_hints, limit=limit)

    async def held_out_turns(self) -> list[str]:
        """Turns that were scored and kept from training."""
        return await self.read(replay_status.held_out_turns)

    async def trained_recordings(self) -> list[str]:
        """Turns of recordings that were trained on."""
        return await self.read(replay_status.trained_recordings)

    async def replace_by_sample(
        self,
        owner: str,
        turn_id: str,
        sample: CapturedTurn,
        *,
        scope: str,
        is_last: bool = True,
    ) -> bool:
        """`sample` takes the place and the verdict of a recorded turn in scoring, which, after the
        last of its samples, -> dropped(resampled).

        False, and nothing is written, if the claim is lost or the recorded turn was forgotten.
        Raises as `record_turn`.
        """
        try:
            prompt_ids, response_ids = await self.read(loading.turn_tokens, turn_id=turn_id)
        except UnknownTurn:  # forgotten while it was sampled
            return False
        turns.check_shared_part(sample, prompt_ids, response_ids)
        prepared = replace(turns.prepare(sample, scope=scope, now=self._clock()), is_compared=True)
        return await self.write(
            replaying.replace_op,
            owner=owner,
            turn_id=turn_id,
            sample=prepared,
            is_last=is_last,
        )

    async def samples_of(self, turn_id: str) -> int:
        """How many samples stand for a recorded turn so far."""
        return await self.read(replaying.samples_of, turn_id=turn_id)

    async def recorded_pass_rate(self, session_id: str) -> float | None:
        """The mean outcome of the recorded sessions at the task of this one; None if unknown."""
        return await self.read(sessions.recorded_pass_rate, session_id=session_id)

    async def has_recorded_outcomes(self) -> bool:
        """Whether a recording has an outcome."""
        return await self.read(replay_status.has_recorded_outcomes)
