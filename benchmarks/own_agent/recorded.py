"""What a measured run has recorded: hints with their states, answers with and without objections,
and how much it trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, select

from opd.run import config as run_config
from opd.run.config import RunConfig
from records.hints.types import LIVE_STATUSES
from records.lessons.rows import LessonSampleRow
from records.reading import summary
from records.store import Store
from records.tables.models import PolicyVersionRow, SampleRow, VerdictRow
from records.types import TurnRecord

MOST_HINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedState:
    """A recorded state at which a hint was practised."""

    turn: TurnRecord
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """`steps`: samples of each trained step, turns and lessons, oldest first. `hinted`: the states
    that trained the hints which still hold, or, if there are none, the turns that they came from.
    `objected` and `accepted` are answers, according to the judge.
    """

    config: RunConfig
    steps: tuple[int, ...]
    hinted: tuple[HintedState, ...]
    objected: tuple[TurnRecord, ...]
    accepted: tuple[TurnRecord, ...]


async def recorded(folder: Path) -> Recorded:
    """Read a run's store."""
    config = run_config.load(folder / "config.toml")
    async with await Store.open(config.store) as store:
        steps = await store.read(_steps)
        objected = await store.load_turns(await store.read(summary.hinted_turn_ids))
        judged = await store.read(_judged)
        accepted = await store.load_turns(sorted(await store.accepted_turns(judged)))
        hinted: list[HintedState] = []
        for hint in await store.hints(statuses=LIVE_STATUSES, limit=MOST_HINTS):
            if not hint.num_steps:
                continue
            states = [one for one in await store.hint_states(hint.hint_id) if not one.held_out]
            places = [one.turn_id for one in states]
            places = places or [one.turn_id for one in await store.hint_sources(hint.hint_id)]
            turns = with_tokens(await store.load_turns(places))
            hinted += [HintedState(turn=turn, hint=hint.text) for turn in turns]
    if not hinted:
        hinted = [HintedState(turn=turn, hint=turn.hint) for turn in objected if turn.hint]
    return Recorded(
        config=config,
        steps=tuple(steps),
        hinted=tuple(hinted),
        objected=tuple(with_tokens(objected)),
        accepted=tuple(with_tokens(accepted)),
    )


def with_tokens(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Those that can be trained on."""
    return [turn for turn in turns if len(turn.prompt_ids) and len(turn.response_ids)]


def _judged(connection: Connection) -> list[str]:
    return list(connection.scalars(select(VerdictRow.turn_id)))


def _steps(connection: Connection) -> list[int]:
    counts: dict[int, int] = {}
    for row in (SampleRow, LessonSampleRow):
        statement = (
            select(row.version, func.count())
            .join(PolicyVersionRow, PolicyVersionRow.version == row.version)
            .where(PolicyVersionRow.abandoned.is_(False))
            .group_by(row.version)
        )
        for version, number in connection.execute(statement):
            counts[version] = counts.get(version, 0) + number
    return [counts[version] for version in sorted(counts)]
