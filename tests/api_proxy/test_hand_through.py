"""What the proxy only hands on: the teacher that a client names, the experts an engine used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from api_proxy.app import ProxyDeps
from api_proxy.config import ProxyConfig
from records.names import TurnState
from records.store import Store
from records.types import Experts, Verdict
from rollout_bridge.config import TeacherRoutes
from rollout_bridge.engine.types import Generation, SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import Door, a_door
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.records.looking import list_turns

HELLO = [{"role": "user", "content": "Hello"}]


class RoutingEngine(ScriptedEngine):
    """Token t of request n went to expert 100 n + t, in two layers; without `is_routing`, none."""

    is_routing = True

    def _final(self, line: Line, params: SamplingParams, length: int, reason: str) -> Generation:
        generation = super()._final(line, params, length, reason)
        if not self.is_routing:
            return generation
        experts = np.arange(len(self.prompts[-1]) + length - 1, dtype=np.int16)
        experts = np.tile(experts[:, None, None] + 100 * len(self.prompts), (1, 2, 1))
        return replace(generation, routed_experts=experts)


@pytest.fixture
def engine() -> RoutingEngine:
    return RoutingEngine()


async def stored_experts(store: Store, turn_id: str) -> Experts | None:
    """The experts of a turn, as a trainer gets them."""
    assert await store.set_next_state(turn_id, [{"role": "user", "content": "no"}])
    await store.claim(TurnState.JUDGING, owner="judge", limit=1, ttl_s=60)
    verdict = Verdict(
        turn_id=turn_id, votes=(), hint=None, selection="longest", judge="judge", reward=-1.0
    )
    assert await store.commit_verdict("judge", verdict, None)
    (sample,) = await store.lease(owner="trainer", count=1, ttl_s=60)
    return sample.routed_experts


@pytest.mark.parametrize("stream", [False, True])
async def test_routed_experts_reach_the_sample(door: Door, stream: bool) -> None:
    door.will_say("Hi there.")
    response = await door.post(HELLO, stream=stream)
    assert response.status_code == 200
    (ref,) = await list_turns(door.store)
    turn = await door.turn(ref.turn_id)
    experts = await stored_experts(door.store, ref.turn_id)
    assert experts is not None
    assert experts.shape == (len(turn.prompt_ids) + len(turn.response_ids) - 1, 2, 1)
    np.testing.assert_array_equal(experts[:, 1, 0], 100 + np.arange(len(experts)))


async def test_a_continued_reply_keeps_the_experts_of_each_part(door: Door) -> None:
    first = door.line("Hi there.", abort_at=2)
    door.will_say(first, replace(first, ids=first.ids[2:], abort_at=None))
    _, turn = await door.say(HELLO)
    assert turn.response_ids.tolist() == first.ids
    experts = await stored_experts(door.store, turn.turn_id)
    assert experts is not None
    total = len(turn.prompt_ids) + len(turn.response_ids) - 1
    seen = len(turn.prompt_ids) + 2 - 1
    numbers = [100 + t for t in range(seen)] + [200 + t for t in range(seen, total)]
    assert experts[:, 0, 0].tolist() == numbers


async def test_experts_of_a_part_alone_are_not_kept(door: Door, engine: RoutingEngine) -> None:
    first = door.line("Hi there.", abort_at=2)
    door.will_say(first, replace(first, ids=first.ids[2:], abort_at=None))
    generate = engine.generate

    async def second_time_without(*args, **kwargs) -> Generation:
        engine.is_routing = not engine.prompts
        return await generate(*args, **kwargs)

    engine.generate = second_time_without  # type: ignore[method-assign]
    _, turn = await door.say(HELLO)
    assert await stored_experts(door.store, turn.turn_id) is None


@pytest.mark.parametrize(
    ("header", "key"), [({"X-Teacher": " math "}, "math"), ({"X-Teacher": " "}, None), ({}, None)]
)
async def test_a_teacher_that_a_client_names_is_stored(
    door: Door, header: dict[str, str], key: str | None
) -> None:
    door.will_say("Hi.")
    _, turn = await door.say(HELLO, header)
    assert turn.teacher_key == key


@pytest.mark.parametrize("header", ["X-Teacher", "X-Data-Source"])
async def test_a_name_that_cannot_be_one_is_refused(door: Door, header: str) -> None:
    field = header.removeprefix("X-").lower().replace("-", "_")
    response = await door.post(HELLO, {header: "m" * 300})
    assert response.status_code == 400
    assert header in response.json()["error"]["message"]
    for name in ("m" * 300, "a\nb", "", 7):
        response = await door.post(HELLO, {}, **{field: name})
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == field


async def test_a_client_that_sets_no_headers_says_it_in_the_body(door: Door) -> None:
    door.will_say("Hi.")
    _, turn = await door.say(HELLO, teacher=" math ", data_source="gsm8k")
    assert (turn.teacher_key, turn.data_source) == ("math", "gsm8k")
    door.will_say("Hello.")
    others = {"X-Teacher": "code", "X-Data-Source": "mbpp"}
    _, turn = await door.say(HELLO, others, teacher="math", data_source="gsm8k")
    assert (turn.teacher_key, turn.data_source) == ("code", "mbpp")


@pytest.mark.parametrize(
    ("headers", "tools", "key"),
    [
        ({"X-Data-Source": "gsm8k"}, [], "math"),
        ({"X-Data-Source": "gsm8k", "X-Teacher": "own"}, [], "own"),
        ({}, ["run"], "code"),
        ({"X-Data-Source": "elsewhere"}, ["look"], None),
    ],
)
async def test_the_configuration_chooses_a_teacher(
    store: Store,
    engine: ScriptedEngine,
    rendering: Rendering,
    headers: dict[str, str],
    tools: list[str],
    key: str | None,
) -> None:
    routes = TeacherRoutes(sources={"gsm8k": "math"}, tools={"run": "code"})
    deps = ProxyDeps(
        store=store, engine=engine, rendering=rendering, config=ProxyConfig(), routes=routes
    )
    offered = [{"type": "function", "function": {"name": name}} for name in tools]
    async with a_door(deps, engine) as door:
        door.will_say("Hi.")
        _, turn = await door.say(HELLO, headers, **({"tools": offered} if offered else {}))
    assert turn.teacher_key == key
    # Kept whether a route knows it or not.
    assert turn.data_source == headers.get("X-Data-Source")
