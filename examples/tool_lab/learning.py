"""The lab's live part: many scripted agents talk at once until the policy has had its updates.

Each conversation goes through the endpoint like any user's. New ones start only while generation is
not too far ahead of training (ALGORITHMS 6.2), because samples of old policies teach less.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import openai

from examples.tool_lab.agent import AgentConfig, run_session
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.preferences import lab_users
from records.names import DropReason, TurnState
from records.store import Store
from records.training.staleness import admit

POLL_S = 0.25
_LAST_REPLIES_S = 10.0
"""How long the agents may take for the replies that they wait for when learning ends: those that
are cut off are recorded as clients that went away.
"""
WITHOUT_HINT = (DropReason.NO_HINT, DropReason.NO_QUORUM, DropReason.HINT_REJECTED)
ACCEPTED_STATES = (TurnState.SCORING, TurnState.READY, TurnState.LEASED, TurnState.TRAINED)


@dataclass(slots=True, kw_only=True)
class LearningState:
    """Where learning stands; refreshed from the store a few times a second."""

    started: float = field(default_factory=time.monotonic)
    version: int = 0
    attempts: int = 0
    is_held: bool = False
    """Whether requests wait for training now."""
    stopped: str | None = None
    """Why the run itself ended training."""
    turns: dict[TurnState, int] = field(default_factory=dict)
    drops: dict[DropReason, int] = field(default_factory=dict)
    sessions: Counter[str] = field(default_factory=Counter)
    reactions: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    seen_at_update: list[tuple[int, Counter[str]]] = field(default_factory=list)
    """For each update attempt: its number and all reactions of users and tools until then."""

    @property
    def seconds(self) -> float:
        """Duration of the learning phase so far."""
        return time.monotonic() - self.started

    @property
    def num_turns(self) -> int:
        """Turns recorded so far, in any state."""
        return sum(self.turns.values())


async def learn(
    *,
    base_url: str,
    model: str,
    store: Store,
    lab: LabConfig,
    batch_size: int,
    failed: asyncio.Future[None],
    why_stopped: Callable[[], str | None],
    is_held: Callable[[], bool],
    progress: Callable[[LearningState], None],
) -> LearningState:
    """Keep agents busy until `lab.updates` update attempts, `lab.max_seconds`, or until
    `why_stopped` says that training has ended.

    Raises the exception of `failed` when a process of the run gives up.
    """
    state = LearningState()
    gate = asyncio.Event()
    gate.set()
    closing = asyncio.Event()
    seeds = itertools.count(lab.seed * 1_000_000)
    agent = AgentConfig(
        model=model,
        preferences=lab_users(lab.preferences),
        open_users=lab.open_users,
        pause_s=lab.pause_s,
    )
    client = openai.AsyncOpenAI(base_url=base_url, api_key="lab", max_retries=3)
    async with client:
        talkers = [
            asyncio.create_task(_talk(client, agent, seeds, gate, closing, state))
            for _ in range(lab.sessions_in_flight)
        ]
        try:
            while state.attempts < lab.updates and state.seconds < lab.max_seconds:
                state.stopped = why_stopped()
                if state.stopped is not None:
                    break
                await _refresh(state, store, batch_size)
                state.is_held = is_held()
                _steer(gate, state, lab, batch_size)
                _note_reactions(state)
                progress(state)
                if failed.done():
                    failed.result()
                _raise_if_ended(talkers)
                await asyncio.sleep(POLL_S)
            closing.set()
            gate.set()
            await asyncio.wait(talkers, timeout=_LAST_REPLIES_S)
        finally:
            for talker in talkers:
                talker.cancel()
            await asyncio.gather(*talkers, return_exceptions=True)
    return state


async def _talk(
    client: openai.AsyncOpenAI,
    agent: AgentConfig,
    seeds: itertools.count[int],
    gate: asyncio.Event,
    closing: asyncio.Event,
    state: LearningState,
) -> None:
    while True:
        await gate.wait()
        if closing.is_set():
            return
        report = await run_session(client, next(seeds), agent, closing=closing)
        state.sessions[report.ended] += 1
        state.reactions.update(report.reactions)
        if report.error is not None:
            state.errors.append(report.error)


async def _refresh(state: LearningState, store: Store, batch_size: int) -> None:
    state.turns = await store.counts()
    state.drops = await store.drops()
    latest = await store.latest_version()
    state.version = latest.version if latest is not None else 0
    reasons = (DropReason.BELOW_NOISE, DropReason.ROLLOUT_REJECTED)
    skipped = sum(state.drops.get(reason, 0) for reason in reasons)
    trained = state.turns.get(TurnState.TRAINED, 0)
    # Steps with lessons contain fewer turns; skipped ones made no version.
    state.attempts = max(state.version, (trained + skipped) // batch_size)


def _steer(gate: asyncio.Event, state: LearningState, lab: LabConfig, batch_size: int) -> None:
    """Open or close the gate for new conversations.

    It counts the samples that wait for training, and as many of the turns still to be judged as
    will probably be accepted: counting them all would starve the trainer, counting none would let
    samples go stale.
    """
    turns = state.turns
    accepted = sum(turns.get(kind, 0) for kind in ACCEPTED_STATES)
    rejected = sum(state.drops.get(reason, 0) for reason in WITHOUT_HINT)
    # Start with one of each, because no verdict is known at first.
    accept_rate = (accepted + 1) / (accepted + rejected + 2)
    waiting = accepted - turns.get(TurnState.TRAINED, 0)
    expected = waiting + round(accept_rate * turns.get(TurnState.JUDGING, 0))
    if admit(expected + 1, batch_size, 0, lab.staleness_eta):
        gate.set()
    else:
        gate.clear()


def _note_reactions(state: LearningState) -> None:
    last = state.seen_at_update[-1][0] if state.seen_at_update else -1
    if state.attempts > last:
        state.seen_at_update.append((state.attempts, Counter(state.reactions)))


def _raise_if_ended(talkers: list[asyncio.Task[None]]) -> None:
    for talker in talkers:
        if talker.done():
            talker.result()
