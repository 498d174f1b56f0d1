"""The guard checks each version once, and orders the way back from one that is too bad. The start
model is the real one; a version is what a test says it answers.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api_proxy.config import ProxyConfig
from opd.guard.asking import Asker, answer_text
from opd.guard.canaries import Canary
from opd.guard.config import GuardConfig
from opd.guard.gap import GapMeasurer, TaughtTurn
from opd.guard.last_good import FILE as ANSWERS
from opd.guard.metrics import GuardMetrics
from opd.guard.worker import GuardWorker
from opd.rehearsal.desk import Desk
from opd.rehearsal.policy_sampler import PolicySampler
from records.types import Ids, Logprobs, TurnRecord
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineRejected, EngineUnavailable
from rollout_bridge.guard.checks import last_check, read_checks
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.teachers import FrozenTeacher
from rollout_bridge.stop_order import STOP_FILE, StopOrder, order_stop, read_stop
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.examples.shipped import MODEL
from tests.opd.rehearsal.builders import a_state
from trainer.schedule.rollback_order import read_rollback

GREETING = Canary(name="greeting", prompt="Hello.", matches=r"\A(?!#)")
"""Any answer but `BAD`, since the start model samples: now and then it says no word."""
BAD = "### ### ### ### ### ### ### ###"


class Silent:
    """A judge that has no majority."""

    async def followed(self, words: str, messages: Any, tools: Any, response: Any) -> bool | None:
        return None


class Policy:
    """What serves: its version, and what it says from now on."""

    def __init__(self, rendering: Rendering) -> None:
        self.engine = ScriptedEngine()
        self.version = 0
        self.scored = -0.5
        """Log-prob of each token of another's answers."""
        self.given_up: set[int] = set()
        self.taught: list[TaughtTurn] = []
        self._rendering = rendering

    async def served(self) -> int:
        return self.version

    async def score(self, input_ids: Ids, start: int) -> Logprobs:
        return np.full(len(input_ids) - start, self.scored, dtype=np.float32)

    async def versions_given_up(self) -> set[int]:
        return self.given_up

    async def taught_turns(self, most: int) -> list[TaughtTurn]:
        return self.taught[:most]

    def says(self, *texts: str | Exception, logprob: float = -0.5) -> None:
        for text in texts:
            if isinstance(text, Exception):
                self.engine.script.append(text)
                continue
            ids = self._rendering.tokenizer.encode(text, add_special_tokens=False)
            ids = [*ids, self._rendering.stop_token_ids[0]]
            self.engine.script.append(Line(ids=ids, logprob=logprob))


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))


@pytest.fixture
async def start(lab_engine: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(lab_engine) as client:
        yield client


@pytest.fixture
def policy(rendering: Rendering) -> Policy:
    return Policy(rendering)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A request that somebody made."""

    prompt_ids: Ids
    tools: list[dict[str, Any]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)


Make = Any


@pytest.fixture
def make(rendering: Rendering, start: EngineClient, policy: Policy, tmp_path: Path) -> Make:
    """A guard of this folder, as after a restart."""

    def made(*canaries: Canary, states: Sequence[Recorded] = (), **settings: Any) -> GuardWorker:
        async def newest() -> Sequence[Recorded]:
            return states

        def sampler(engine: Any) -> PolicySampler:
            return PolicySampler(
                engine,
                rendering,
                temperature=1.0,
                max_new_tokens=16,
                context_length=None,
                pause_mode="retract",
                proxy=ProxyConfig(),
            )

        usual = {"samples": 2, "start_samples": 4, "max_longer": 1e3}
        usual |= {"least_entropy": 0.0, "max_kl": 1e3, "max_kl_last": 1e3, "max_gap_rise": 1e3}
        config = GuardConfig(**(usual | settings))
        asker = Asker(
            canaries=canaries or (GREETING,),
            rendering=rendering,
            start=start,
            judge=Silent(),
            timeout_s=config.check_timeout_s,
        )
        teacher = FrozenTeacher("teacher", start)
        return GuardWorker(
            asker,
            config,
            policy=sampler(policy.engine),
            start=sampler(start),
            version=policy.served,
            states=newest,
            scores=policy,
            gap=GapMeasurer(Desk(rendering, teacher), sampler(policy.engine), sampler(start)),
            records=policy,
            folder=tmp_path,
            metrics=GuardMetrics(),
        )

    return made


async def test_a_version_that_passes_is_checked_once(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make()
    await guard.look()
    [begun] = read_checks(tmp_path)
    assert (begun.version, begun.asked, begun.passed) == (0, 4, 4)
    policy.version = 1
    policy.says("Good day.", "Hello!")
    await guard.look()
    await guard.look()
    found = last_check(tmp_path)
    assert found is not None
    assert (found.version, found.passed, found.asked, found.breaches) == (1, 2, 2, [])
    assert found.kl is not None
    assert found.surprise == pytest.approx(0.5)
    assert read_stop(tmp_path) is None
    # A guard that restarts knows what was checked.
    await make().look()
    assert len(read_checks(tmp_path)) == 2


async def test_a_version_that_fails_is_withdrawn_and_training_stops(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make(samples=8)
    await guard.look()
    policy.version = 1
    policy.says(*["Hello."] * 8)
    await guard.look()
    policy.version = 2
    policy.says(*[BAD] * 8)
    await guard.look()
    assert read_rollback(tmp_path) == 1
    order = read_stop(tmp_path)
    assert order is not None
    assert "withdrew version 2" in order.reason
    assert "guard.least_passed" in order.reason
    assert order.serve_version == 1
    found = last_check(tmp_path)
    assert found is not None
    assert found.failed == {"greeting": 8}
    # The rollback is a version of its own, and the next way back leads to it.
    policy.version = 3
    policy.says(*["Hello."] * 8)
    await guard.look()
    policy.version = 4
    policy.says(*[BAD] * 8)
    restarted = make(samples=8)
    await restarted.look()
    assert read_rollback(tmp_path) == 3
    assert restarted._metrics.registry.get_sample_value("guard_withdrawn_total") == 2


async def test_drift_is_a_breach_too(make: Make, policy: Policy, tmp_path: Path) -> None:
    guard = make(max_kl=0.5)
    await guard.look()
    policy.version = 1
    policy.says("qz xv qz", "xq zv", logprob=-0.01)
    await guard.look()
    found = last_check(tmp_path)
    assert found is not None
    assert found.kl is not None
    assert found.kl > 0.5
    assert any("guard.max_kl" in one for one in found.breaches)


async def test_a_jump_from_the_last_good_version_is_a_breach(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make(max_kl_last=0.5)
    await guard.look()
    policy.version, policy.scored = 1, -1.0
    policy.says("Hello.", "Hello.", logprob=-0.25)
    guard._config = guard._config.model_copy(update={"max_kl_last": 1e3})
    await guard.look()
    first = last_check(tmp_path)
    assert first is not None
    assert first.last_good == 0, "the start's answers are the first to compare with"
    assert first.kl_last is not None
    # Its own answers had -0.25 a token; version 2 gives them -1.
    policy.version = 2
    policy.says("Hello.", "Hello.")
    restarted = make(max_kl_last=0.5)
    await restarted.look()
    found = last_check(tmp_path)
    assert found is not None
    assert (found.version, found.last_good) == (2, 1)
    assert found.kl_last == pytest.approx(0.75)
    [breach] = found.breaches
    assert breach.startswith("answers of version 1, the last good one, are 0.75 nats per token")
    assert "guard.max_kl_last" in breach
    assert read_rollback(tmp_path) == 1
    registry = restarted._metrics.registry
    assert registry.get_sample_value("guard_check", {"of": "kl_last_nats"}) == pytest.approx(0.75)
    # A version that failed is never compared with: the rollback is compared with version 1.
    policy.version, policy.scored, policy.given_up = 3, -0.25, {2}
    policy.says("Hello.", "Hello.")
    await restarted.look()
    found = last_check(tmp_path)
    assert found is not None
    assert (found.last_good, found.breaches) == (1, [])
    assert found.kl_last == pytest.approx(0.0)


async def test_a_version_that_somebody_rolled_back_is_neither_compared_with_nor_served(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make(samples=8, max_kl_last=0.5)
    await guard.look()
    guard._config = guard._config.model_copy(update={"max_kl_last": 1e3})
    for version in (1, 2):
        policy.version = version
        policy.says(*["Hello."] * 8)
        await guard.look()
    guard._config = guard._config.model_copy(update={"max_kl_last": 0.5})
    # Version 3 restores version 1: far from version 2, which is given up.
    policy.version, policy.scored, policy.given_up = 3, -9.0, {2}
    policy.says(*[BAD] * 8)
    await guard.look()
    found = last_check(tmp_path)
    assert found is not None
    assert (found.kl_last, found.last_good) == (None, None)
    assert any("guard.least_passed" in one for one in found.breaches)
    assert read_rollback(tmp_path) == 1


async def test_answers_that_cannot_be_read_are_not_compared(
    make: Make, policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await make().look()
    (tmp_path / ANSWERS).write_text("{", encoding="utf-8")
    policy.version, policy.scored = 1, -9.0
    policy.says("Hello.", "Hello.")
    await make(max_kl_last=0.5).look()
    found = last_check(tmp_path)
    assert found is not None
    assert (found.kl_last, found.breaches) == (None, [])
    assert f"{ANSWERS} cannot be read" in caplog.text


async def test_no_more_answers_are_kept_than_a_version_gives(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    await make(samples=2, start_samples=6).look()
    assert len(json.loads((tmp_path / ANSWERS).read_text(encoding="utf-8"))["answers"]) == 2


async def test_a_gap_that_grows_is_a_breach(
    make: Make, policy: Policy, rendering: Rendering, tmp_path: Path
) -> None:
    turns = [
        a_turn_of(rendering, f"How warm is it in {city}?") for city in ("Oslo", "Rome", "Kyiv")
    ]
    policy.taught = [TaughtTurn(turn=one, hint="Answer in Celsius.") for one in turns]
    guard = make(samples=2, max_gap_rise=0.5)
    await guard.look()
    begun = last_check(tmp_path)
    assert begun is not None
    assert begun.gap is None, "nothing has trained"
    policy.version = 1
    policy.says(*["Hello."] * 2, *["qz xv qz xq zv"] * 6, logprob=-0.01)
    await guard.look()
    found = last_check(tmp_path)
    assert found is not None
    assert found.gap is not None
    assert found.gap_start is not None
    assert found.gap.num_samples == found.gap_start.num_samples == 6
    assert found.gap.low > found.gap_start.value + 0.5
    [breach] = found.breaches
    assert breach.startswith("at turns that trained, answers are ")
    assert "guard.max_gap_rise" in breach
    registry = guard._metrics.registry
    value = registry.get_sample_value("guard_check", {"of": "gap_nats"})
    assert value == pytest.approx(found.gap.value)


async def test_the_gap_is_measured_at_as_many_turns_as_are_asked_for(
    make: Make, policy: Policy, rendering: Rendering, tmp_path: Path
) -> None:
    turns = [
        a_turn_of(rendering, f"How warm is it in {city}?") for city in ("Oslo", "Rome", "Kyiv")
    ]
    policy.taught = [TaughtTurn(turn=one, hint="Answer in Celsius.") for one in turns]
    policy.version = 1
    for most, number in ((0, None), (1, 2)):
        policy.says(*["Hello."] * (4 if most else 2))
        guard = make(samples=2, gap_turns=most)
        await guard.look()
        found = last_check(tmp_path)
        assert found is not None
        assert (found.gap and found.gap.num_samples) == number
        policy.version += 1


def a_turn_of(rendering: Rendering, words: str) -> TurnRecord:
    prompt_ids = rendering.prompt_ids([{"role": "user", "content": words}])
    return a_state(words, words, prompt_ids=prompt_ids)


async def test_a_version_that_changes_meanwhile_is_not_judged_by_a_mixture(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make()
    await guard.look()
    versions = iter([1, 2])

    async def served() -> int:
        return next(versions)

    guard._version = served
    policy.says(BAD, BAD)
    await guard.look()
    assert [row.version for row in read_checks(tmp_path)] == [0]
    assert read_stop(tmp_path) is None


async def test_an_order_to_stop_that_is_there_keeps_its_reason(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make(samples=8)
    await guard.look()
    order_stop(tmp_path, StopOrder(reason="somebody else"))
    policy.version = 1
    policy.says(*[BAD] * 8)
    await guard.look()
    order = read_stop(tmp_path)
    assert order is not None
    assert order == StopOrder(reason="somebody else", serve_version=0)
    assert read_rollback(tmp_path) is None, "the start cannot be trained on from"


async def test_a_version_that_failed_is_checked_again_once_training_is_resumed(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make(samples=8)
    policy.version = 1
    policy.says(*[BAD] * 8)
    await guard.look()
    await guard.look()
    assert len(read_checks(tmp_path)) == 2
    (tmp_path / STOP_FILE).unlink()
    policy.says(*["Hello."] * 8)
    await guard.look()
    assert [row.breaches == [] for row in read_checks(tmp_path)] == [True, False, True]


async def test_an_engine_that_fails_is_asked_again(
    make: Make, policy: Policy, tmp_path: Path
) -> None:
    guard = make(samples=1)
    stop = asyncio.Event()
    policy.version = 1
    policy.says(EngineUnavailable("down"), "Hello.")
    running = asyncio.create_task(guard.run(stop))
    async with asyncio.timeout(60):
        while len(read_checks(tmp_path)) < 2:
            await asyncio.sleep(0.05)
    stop.set()
    await running
    assert [row.version for row in read_checks(tmp_path)] == [0, 1]


async def test_recorded_requests_are_answered_by_both_models_and_limited_alone(
    make: Make, policy: Policy, rendering: Rendering, tmp_path: Path
) -> None:
    asked = rendering.prompt_ids([{"role": "user", "content": "How warm is it in Oslo?"}])
    states = [Recorded(prompt_ids=asked), Recorded(prompt_ids=asked)]
    guard = make(states=states, samples=1, max_repeated=0.3)
    await guard.look()
    [begun] = read_checks(tmp_path)
    assert begun.recorded is None, "the start is not compared with itself"
    policy.version = 1
    policy.says("Hello.", BAD, BAD)
    await guard.look()
    found = read_checks(tmp_path)[-1]
    assert found.passed == 1
    assert found.recorded is not None
    assert found.recorded_start is not None
    assert found.recorded.repeated is not None
    assert found.recorded.repeated > 0.5
    assert found.recorded_start.kl == pytest.approx(0, abs=1e-3)
    [breach] = found.breaches
    assert breach.startswith("answers to recorded requests repeat")


async def test_a_recorded_request_that_the_engine_refuses_by_now_is_left_out(
    make: Make, policy: Policy, rendering: Rendering, tmp_path: Path
) -> None:
    asked = rendering.prompt_ids([{"role": "user", "content": "How warm is it in Oslo?"}])
    guard = make(states=[Recorded(prompt_ids=asked)] * 2, samples=1)
    await guard.look()
    policy.version = 1
    policy.says("Hello.", EngineRejected(400, "too long"), "It is warm.")
    await guard.look()
    found = read_checks(tmp_path)[-1]
    assert found.breaches == []
    assert found.recorded is not None
    assert found.recorded.tokens is not None


RELEASE = threading.Event()


def hangs(text: str) -> bool:
    return RELEASE.wait(30) or True


def fails(text: str) -> bool:
    raise RuntimeError("no idea")


def is_short(text: str) -> bool:
    return len(text) < 1000


async def test_functions_decide_and_those_that_hang_or_fail_decide_nothing(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {name: f"{__name__}:{name}" for name in ("hangs", "fails", "is_short")}
    canaries = [Canary(name=name, prompt="Hello.", function=path) for name, path in paths.items()]
    guard = make(*canaries, start_samples=2, check_timeout_s=0.2)
    try:
        await guard.look()
    finally:
        RELEASE.set()
    [found] = read_checks(tmp_path)
    assert (found.asked, found.passed) == (2, 2)
    assert "took more than 0.2 s" in caplog.text
    assert "raised RuntimeError: no idea" in caplog.text


async def test_a_pattern_that_backtracks_endlessly_decides_nothing_and_holds_nobody(
    make: Make, policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless = Canary(name="endless", prompt="Hello.", matches=r"^(\w|\w\w)*$")
    guard = make(endless, start_samples=1, samples=1, check_timeout_s=0.5)
    await guard.look()
    policy.version = 1
    policy.says("a" * 60 + "!")
    longest_s, last = 0.0, time.monotonic()
    looking = asyncio.create_task(guard.look())
    while not looking.done():
        await asyncio.sleep(0.01)
        longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
    await looking
    assert read_checks(tmp_path)[-1].undecided == 1
    assert "canary endless: 'matches' took more than 0.5 s" in caplog.text
    assert longest_s < 0.3


async def test_a_start_without_an_answer_that_can_be_checked_is_said(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await make(Canary(name="a", prompt="Hello.", follows="Be kind."), start_samples=1).look()
    assert "canaries guard nothing" in caplog.text


async def test_a_start_that_fails_its_canaries_is_said(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await make(Canary(name="odd", prompt="Hello.", contains="\u2603"), start_samples=1).look()
    assert "passes only 0 of 1 canaries (worst: odd)" in caplog.text


def test_calls_are_part_of_what_is_checked() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": "Looking.", "tool_calls": [call]}
    assert answer_text(message) == 'Looking.\nweather({"city": "Oslo"})'
