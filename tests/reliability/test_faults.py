"""Engine, judge and teacher break on the wire: what the agent sees, what the turn becomes.

Real parts on both sides of the break: the embedded engine with the lab's model, the proxy, the
workers, the official client. What a client does about a fault is tested beside that client (of
engines: tests/rollout_bridge, of the judge: tests/judge); here it is asked where a turn ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from judge.config import JudgeConfig
from judge.worker import JudgeWorker
from records.names import DropReason, TurnState
from records.store import Store
from records.types import TurnRecord, Verdict
from rollout_bridge.config import ClaimLoopConfig, ScoringConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.scoring import ScoringWorker
from tests.records.looking import list_turns, votes_of
from tests.records.new_store import new_store
from tests.reliability.faulty_wire import (
    CUT,
    CUT_LATER,
    ERROR_500,
    GARBAGE,
    HANGS_UP,
    NAN,
    NULL,
    SLOW,
    TOO_SHORT,
    Fault,
    FaultyWire,
)
from tests.workers import run_until_left

CLIENT = EngineClientConfig(attempts=4, retry_wait_s=0.05, retry_wait_max_s=0.2)
LOOP = ClaimLoopConfig(pause_min_s=0.05, pause_max_s=0.2, give_up_after_s=1.0)
PATIENT = LOOP.model_copy(update={"give_up_after_s": 600.0})
HINT = "Give temperatures in Celsius."
MESSAGES = [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": "What is the weather in Karo?"},
]
REACTION = {"role": "user", "content": "I wanted Celsius."}
BAD_LOGPROBS = DropReason.ROLLOUT_LOGPROBS_INVALID


@dataclass
class Run:
    """A proxy over a broken wire, its store, and an agent."""

    store: Store
    engine: EngineClient
    wire: FaultyWire
    rendering: Rendering
    agent: openai.AsyncOpenAI

    async def ask(self, messages: list[dict[str, Any]], *, stream: bool) -> tuple[str, str | None]:
        """The turn that answered, and why its reply ended. Raises openai.APIError."""
        request: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 96}
        request |= {"temperature": 1.0, "seed": 3}
        if not stream:
            whole = await self.agent.chat.completions.create(**request)
            return whole.id.removeprefix("chatcmpl-"), whole.choices[0].finish_reason
        turn_id, reason = "", None
        async for chunk in await self.agent.chat.completions.create(**request, stream=True):
            turn_id = chunk.id.removeprefix("chatcmpl-")
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
        return turn_id, reason

    async def turn(self, turn_id: str) -> TurnRecord:
        (turn,) = await self.store.turns([turn_id])
        return turn

    async def answered_turn(self) -> str:
        """A turn with its next state."""
        turn_id, _ = await self.ask(MESSAGES, stream=False)
        assert await self.store.set_next_state(turn_id, [REACTION])
        return turn_id


@pytest.fixture
async def run(lab_engine: str, rendering: Rendering, tmp_path: Path) -> AsyncIterator[Run]:
    async with a_run(lab_engine, rendering, tmp_path, CLIENT) as opened:
        yield opened


@asynccontextmanager
async def a_run(
    lab_engine: str, rendering: Rendering, folder: Path, config: EngineClientConfig
) -> AsyncIterator[Run]:
    async with (
        await Store.open(new_store(folder / "records.db")) as store,
        FaultyWire(lab_engine) as wire,
        EngineClient(wire.url, config=config, vocab_size=rendering.vocab_size) as engine,
    ):
        deps = ProxyDeps(store=store, engine=engine, rendering=rendering, config=ProxyConfig())
        app = create_app(deps)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False))
        async with (
            app.router.lifespan_context(app),
            openai.AsyncOpenAI(
                base_url="http://127.0.0.1/v1", api_key="key", max_retries=0, http_client=http
            ) as agent,
        ):
            yield Run(store, engine, wire, rendering, agent)


BROKEN_ONCE: list[tuple[Fault, DropReason | None, bool]] = [
    (fault, reason, stream)
    for fault, reason in (
        (HANGS_UP, None),
        (ERROR_500, None),
        (SLOW, None),
        (CUT, None),
        (NAN, BAD_LOGPROBS),
        (NULL, BAD_LOGPROBS),
        (TOO_SHORT, BAD_LOGPROBS),
    )
    for stream in (False, True)
]
# A stream without an event broke off before its first: nothing was said that could be wrong.
BROKEN_ONCE += [(GARBAGE, BAD_LOGPROBS, False), (GARBAGE, None, True)]


@pytest.mark.parametrize(
    ("fault", "reason", "stream"),
    BROKEN_ONCE,
    ids=[f"{fault}-{'streamed' if stream else 'whole'}" for fault, _, stream in BROKEN_ONCE],
)
async def test_a_broken_policy_answer_is_mended_and_does_not_teach_what_is_wrong(
    run: Run, fault: Fault, reason: DropReason | None, stream: bool
) -> None:
    run.wire.faults.append(fault)
    turn_id, ended = await run.ask(MESSAGES, stream=stream)
    assert run.wire.happened[fault.name] == 1
    assert ended in ("stop", "tool_calls")
    turn = await run.turn(turn_id)
    assert turn.drop_reason == reason
    assert turn.state is (TurnState.DROPPED if reason else TurnState.AWAITING_NEXT_STATE)


async def test_a_stream_that_breaks_off_in_its_middle_goes_on(run: Run) -> None:
    run.wire.faults.append(CUT_LATER)
    turn_id, reason = await run.ask(MESSAGES, stream=True)
    assert run.wire.happened == {CUT_LATER.name: 1, "none": 1}
    assert reason in ("stop", "tool_calls")
    turn = await run.turn(turn_id)
    assert turn.sampling["num_continuations"] == 1
    # Of the part that was lost, nobody said which weights sampled it.
    assert (turn.state, turn.drop_reason) == (TurnState.DROPPED, DropReason.UNKNOWN_VERSION)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", [HANGS_UP, ERROR_500, GARBAGE, NAN], ids=str)
async def test_the_agent_hears_of_a_policy_that_cannot_answer_and_of_nothing_else(
    run: Run, fault: Fault, stream: bool
) -> None:
    run.wire.always = fault
    with pytest.raises(openai.APIError) as refused:
        await run.ask(MESSAGES, stream=stream)
    assert isinstance(refused.value.body, dict)
    assert {"message", "type"} <= set(refused.value.body)
    run.wire.always = None
    turn_id, _ = await run.ask(MESSAGES, stream=stream)
    assert (await run.turn(turn_id)).state is TurnState.AWAITING_NEXT_STATE
    others = [turn for turn in await list_turns(run.store) if turn.turn_id != turn_id]
    assert all(turn.drop_reason for turn in others)


async def test_an_engine_that_is_away_for_a_while_costs_no_answer(
    lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    patient = CLIENT.model_copy(update={"attempts": 200})
    async with a_run(lab_engine, rendering, tmp_path, patient) as run:
        await run.wire.refuse()
        asking = asyncio.create_task(run.ask(MESSAGES, stream=True))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await run.wire.listen()
        turn_id, _ = await asking
        assert (await run.turn(turn_id)).state is TurnState.AWAITING_NEXT_STATE


def judge(run: Run, loop: ClaimLoopConfig) -> JudgeWorker:
    config = JudgeConfig(
        base_url=f"{run.wire.url}/v1",
        model="frozen",
        max_tokens=48,
        max_prompt_tokens=4096,
        retry_wait_s=0.05,
        loop=loop,
    )
    return JudgeWorker(run.store, config, "judge-1")


@pytest.mark.parametrize("fault", [HANGS_UP, ERROR_500, SLOW, CUT, GARBAGE], ids=str)
async def test_a_judge_that_breaks_once_gives_a_verdict(run: Run, fault: Fault) -> None:
    turn_id = await run.answered_turn()
    run.wire.faults.append(fault)
    await run_until_left(run.store, TurnState.JUDGING, judge(run, PATIENT))
    assert run.wire.happened[fault.name] == 1
    votes = await votes_of(run.store, turn_id)
    assert len(votes) == 3
    assert sum(vote.error is None for vote in votes) >= 2
    turn = await run.turn(turn_id)
    by_verdict = (None, DropReason.NO_HINT, DropReason.HINT_REJECTED)
    assert turn.state in (TurnState.SCORING, TurnState.DROPPED)
    assert turn.drop_reason in by_verdict


@pytest.mark.parametrize("fault", [HANGS_UP, ERROR_500, GARBAGE], ids=str)
async def test_a_judge_that_stays_broken_drops_the_turn_and_says_so(run: Run, fault: Fault) -> None:
    turn_id = await run.answered_turn()
    run.wire.always = fault
    await run_until_left(run.store, TurnState.JUDGING, judge(run, LOOP))
    turn = await run.turn(turn_id)
    assert (turn.state, turn.drop_reason) == (TurnState.DROPPED, DropReason.JUDGE_UNAVAILABLE)
    assert all(vote.error for vote in await votes_of(run.store, turn_id))


async def hinted_turn(run: Run) -> str:
    """A turn that waits for the teacher."""
    turn_id = await run.answered_turn()
    (turn,) = await run.store.claim(TurnState.JUDGING, owner="test", limit=1, ttl_s=600)
    assert turn.turn_id == turn_id
    verdict = Verdict(turn_id=turn_id, votes=(), hint=HINT, selection="longest", judge="test")
    assert await run.store.commit_verdict("test", verdict, None)
    return turn_id


def teacher(run: Run, loop: ClaimLoopConfig) -> ScoringWorker:
    return ScoringWorker(run.store, run.engine, run.rendering, ScoringConfig(loop=loop), "scorer-1")


@pytest.mark.parametrize("fault", [HANGS_UP, ERROR_500, SLOW, CUT], ids=str)
async def test_a_teacher_that_breaks_once_scores_the_turn(run: Run, fault: Fault) -> None:
    turn_id = await hinted_turn(run)
    run.wire.faults.append(fault)
    await run_until_left(run.store, TurnState.SCORING, teacher(run, PATIENT))
    assert run.wire.happened[fault.name] == 1
    turn, score = await run.turn(turn_id), await run.store.score_of(turn_id)
    assert turn.state is TurnState.READY
    assert score is not None
    assert score.teacher_logprobs.shape == turn.response_ids.shape
    assert np.isfinite(score.teacher_logprobs).all()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (GARBAGE, DropReason.TEACHER_MISALIGNED),
        (TOO_SHORT, DropReason.TEACHER_MISALIGNED),
        # NaN is no JSON: nothing of the reply can be read. SGLang writes null.
        (NAN, DropReason.TEACHER_MISALIGNED),
        (NULL, DropReason.TEACHER_LOGPROBS_INVALID),
    ],
    ids=str,
)
async def test_scores_that_are_wrong_never_train(
    run: Run, fault: Fault, reason: DropReason
) -> None:
    turn_id = await hinted_turn(run)
    run.wire.always = fault
    await run_until_left(run.store, TurnState.SCORING, teacher(run, LOOP))
    turn = await run.turn(turn_id)
    assert (turn.state, turn.drop_reason) == (TurnState.DROPPED, reason)
    assert await run.store.score_of(turn_id) is None


@pytest.mark.parametrize("fault", [HANGS_UP, ERROR_500], ids=str)
async def test_a_teacher_that_stays_away_drops_the_turn_and_says_so(run: Run, fault: Fault) -> None:
    turn_id = await hinted_turn(run)
    run.wire.always = fault
    await run_until_left(run.store, TurnState.SCORING, teacher(run, LOOP))
    turn = await run.turn(turn_id)
    assert (turn.state, turn.drop_reason) == (TurnState.DROPPED, DropReason.TEACHER_UNAVAILABLE)
