"""The verifier stage on a store: outcomes, failures that are counted, and nothing asked in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from judge.verifier.config import VerifierConfig
from judge.verifier.worker import VerifierWorker
from records.messages import Message
from records.names import DropReason
from records.outcomes.values import values_of
from records.store import Store
from records.training.outcome_rewards import OutcomeRewards
from records.types import TurnRecord
from rollout_bridge.config import ClaimLoopConfig
from rollout_bridge.worker import ServiceUnavailable
from tests.judge.verifier.test_calls import MODULE
from tests.records.builders import SCOPE, TRAINER, a_session, recorded
from tests.records.new_store import new_store

QUICK = ClaimLoopConfig(
    concurrency=2, poll_min_s=0.01, poll_max_s=0.02, give_up_after_s=0.5, max_attempts=2
)


@pytest.fixture
async def store(tmp_path: Path):
    async with await Store.open(new_store(tmp_path / "records.db")) as opened:
        yield opened


async def over(store: Store, answer: str) -> str:
    """A session that ended with this answer, to which nobody replied."""
    turn_id = await recorded(store, response={"role": "assistant", "content": answer})
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.session_id


async def run(
    store: Store,
    function: str,
    until: Callable[[VerifierWorker], bool],
    policy: Says | None = None,
    **settings: float,
) -> VerifierWorker:
    config = VerifierConfig(source=f"{MODULE}:{function}", idle_s=0.001, loop=QUICK, **settings)
    worker = VerifierWorker(store, config, "verifier", policy or Says())
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(60):
        while not until(worker):
            await asyncio.sleep(0.02)
    stop.set()
    await task
    return worker


def value(worker: VerifierWorker, name: str, **labels: str) -> float:
    found = worker.metrics.registry.get_sample_value(name, labels)
    assert found is not None
    return found


async def outcome(store: Store, session_id: str) -> tuple[float | None, str | None, str | None]:
    [session] = await store.sessions_named(session_id)
    assert session.outcome is not None
    return session.outcome.value, session.outcome.reason, session.outcome.failure


async def test_each_session_gets_its_outcome(store: Store) -> None:
    polite, short = await over(store, "Yes, please."), await over(store, "No.")
    worker = await run(store, "words", lambda worker: value(worker, "verifier_outcomes_total") == 2)
    assert await outcome(store, polite) == (1.0, "it is polite", None)
    assert await outcome(store, short) == (0.25, "0 tools", None)
    assert value(worker, "verifier_outcome_sum_total") == 1.25
    # Its last answer is judged by that now.
    [session] = await store.sessions_named(polite)
    assert [turn.state.value for turn in session.turns] == ["judging"]


class Says:
    """A policy that says these, one after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def answer_again(self, turn: TurnRecord) -> Message | None:
        self.asked.append(turn.turn_id)
        if not self.answers:
            raise ServiceUnavailable("the policy's engine: gone")
        return {"role": "assistant", "content": self.answers.pop(0)}


async def test_each_turn_is_valued_by_further_answers(store: Store) -> None:
    """Outcomes 1, 0.5 and no number; then 0 and twice no number; then only such."""
    session_id = await a_session(store)
    first = await recorded(store, session_id=session_id)
    answer = {"role": "assistant", "content": "0.75"}
    last = await recorded(store, session_id=session_id, parent_turn_id=first, response=answer)
    policy = Says("1", "0.5", "7", "7", "7", "7")
    worker = await run(
        store,
        "number",
        lambda worker: value(worker, "verifier_outcomes_total") == 1,
        policy=policy,
        continuations=3,
    )
    assert policy.asked == [first] * 3 + [last] * 3
    assert value(worker, "verifier_continuations_total") == 2
    found = await store.read(values_of, session_ids=[session_id])
    assert found == {session_id: ((first, 0.75), (last, None))}
    assert (await outcome(store, session_id))[0] == 0.75


async def test_a_verifier_that_fails_at_further_answers_costs_no_outcome(store: Store) -> None:
    session_id = await over(store, "0.75")
    worker = await run(
        store,
        "number",
        lambda worker: value(worker, "verifier_outcomes_total") == 1,
        policy=Says("1", "no Python", "7"),
        continuations=3,
    )
    assert (await outcome(store, session_id))[0] == 0.75
    [values] = (await store.read(values_of, session_ids=[session_id])).values()
    assert [found for _, found in values] == [1.0]
    assert value(worker, "verifier_failures_total", reason="failed") == 1
    assert value(worker, "verifier_failures_total", reason="invalid") == 1


async def test_a_policy_that_is_gone_is_waited_for(store: Store) -> None:
    session_id = await over(store, "0.75")
    worker = await run(
        store,
        "number",
        lambda worker: value(worker, "verifier_given_up_total") == 1,
        policy=Says(),
        continuations=2,
    )
    assert value(worker, "verifier_outcomes_total") == 0
    assert (await outcome(store, session_id))[2] == "the policy's engine: gone"


async def test_an_answer_that_is_no_outcome_is_not_asked_for_again(store: Store) -> None:
    session_id = await over(store, "7")
    worker = await run(
        store, "number", lambda worker: value(worker, "verifier_given_up_total") == 1
    )
    assert value(worker, "verifier_failures_total", reason="invalid") == 1
    said, _, failure = await outcome(store, session_id)
    assert said is None
    assert failure == "invalid: the outcome is not a number from 0 to 1"


@pytest.mark.parametrize(
    ("function", "reason", "settings"),
    [("raises", "failed", {}), ("hangs", "timeout", {"timeout_s": 0.5})],
)
async def test_a_verifier_that_fails_is_waited_for_and_then_given_up(
    store: Store, function: str, reason: str, settings: dict[str, float]
) -> None:
    session_id = await over(store, "x")
    worker = await run(
        store, function, lambda worker: value(worker, "verifier_given_up_total") == 1, **settings
    )
    assert value(worker, "verifier_failures_total", reason=reason) >= 2
    said, _, failure = await outcome(store, session_id)
    assert said is None
    assert failure is not None
    assert failure.startswith(f"verifier: {reason}: ")
    waiting = OutcomeRewards(kind="only", wait_s=1e6)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=9.0, outcomes=waiting) == []
    assert DropReason.NO_OUTCOME not in await store.drops()  # it waits for its next message still


async def test_what_a_person_said_meanwhile_stands(store: Store) -> None:
    session_id = await over(store, "Yes, please.")
    assert await store.add_outcome(SCOPE, 0.0, None, session=session_id) is not None
    other = await over(store, "No.")
    await run(store, "words", lambda worker: value(worker, "verifier_outcomes_total") == 1)
    assert (await outcome(store, session_id))[0] == 0.0
    assert (await outcome(store, other))[0] == 0.25
