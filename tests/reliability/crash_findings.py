"""What must hold after the crash run: asked of the agents' log, the manifests and the database."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Row, select

from opd.commands.records import verify
from opd.run.config import RunConfig
from records.lessons.names import LessonState
from records.lessons.rows import LessonRow
from records.names import TurnState
from records.spill.spill import waiting_files
from records.store import Store
from tests.records.looking import list_turns
from tests.reliability.client_log import ClientLog
from trainer.checkpoints.checkpoint import Checkpoints

UNDER_WAY = (TurnState.JUDGING, TurnState.SCORING, TurnState.LEASED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All lists are empty after a run without fault."""

    num_acknowledged: int
    num_trained: int
    num_lessons: int
    """Lessons that trained."""
    num_versions: int
    lost: list[str]
    """Acknowledged turns that the store does not have."""
    trained_twice: list[str]
    """Turns and lessons that the surviving manifests name more than once."""
    misjudged: list[str]
    """Turns and lessons that the store calls trained and the manifests do not, or the other way
    round.
    """
    stuck: list[str]
    """Rows that no process moved on, though all of them ran undisturbed; waiting spill files."""
    unverified: list[str]
    """What `opd records verify` finds."""

    @property
    def are_none(self) -> bool:
        """Whether nothing was found."""
        found = (self.lost, self.trained_twice, self.misjudged, self.stuck, self.unverified)
        return not any(found)


async def drained(store: Store, config: RunConfig, timeout_s: float) -> None:
    """Close all sessions, and wait until nothing is under way, less than a batch is ready, and
    nothing is spilled; what is stuck stays, and is found afterwards.
    """
    batch = config.trainer.rollout_batch_size
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                await store.close_idle_sessions(0.0)
                counts = await store.counts()
                waiting = sum(counts[state] for state in UNDER_WAY)
                spilled = waiting_files(config.store.spill_path)
                if waiting == 0 and counts[TurnState.READY] < batch and not spilled:
                    return
                await asyncio.sleep(0.5)
    except TimeoutError:
        return


async def find(store: Store, config: RunConfig, folder: Path, log: ClientLog) -> Findings:
    """Compare what is there with what must be. All processes but the engines have ended."""
    turns = {turn.turn_id: turn for turn in await list_turns(store, limit=10_000_000)}
    chain = Checkpoints(folder / "checkpoints", config.model, config.trainer.seed).open()
    on_chain = Counter(turn_id for manifest in chain for turn_id in manifest.turn_ids)
    taught = Counter(lesson_id for manifest in chain for lesson_id in manifest.lesson_ids)
    in_store = {key for key, turn in turns.items() if turn.state is TurnState.TRAINED}
    lessons = await store.read(_lessons)
    taught_in_store = {row.lesson_id for row in lessons if row.state is LessonState.TRAINED}
    outcome = await asyncio.to_thread(verify, folder / "config.toml", None)
    return Findings(
        num_acknowledged=len(log.acknowledged),
        num_trained=len(on_chain),
        num_lessons=len(taught),
        num_versions=len(chain) - 1,
        lost=sorted(log.acknowledged - set(turns)),
        trained_twice=sorted(key for key, count in (on_chain + taught).items() if count > 1),
        misjudged=sorted((in_store ^ set(on_chain)) | (taught_in_store ^ set(taught))),
        stuck=[
            *(f"{key}: {turn.state}" for key, turn in turns.items() if _is_stuck(turn.state)),
            # What is under way is never done with while hints are practised; nobody holds it.
            *(f"{row.lesson_id}: held by {row.claim_owner}" for row in lessons if row.claim_owner),
            *(str(path) for path in waiting_files(config.store.spill_path)),
        ],
        unverified=[] if outcome.is_well else outcome.lines,
    )


def _lessons(connection: Connection) -> Sequence[Row[tuple[str, LessonState, str | None]]]:
    columns = (LessonRow.lesson_id, LessonRow.state, LessonRow.claim_owner)
    return connection.execute(select(*columns)).all()


def _is_stuck(state: TurnState) -> bool:
    # Sessions were closed: no turn waits for its next state any more.
    return state in (*UNDER_WAY, TurnState.AWAITING_NEXT_STATE)
