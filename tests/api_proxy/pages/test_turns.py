"""*Turn*: its tokens with their numbers, votes, the hinted prompt, and the teacher's answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from api_proxy.access.callers import tenant_scope
from records.names import HintRejection, TurnState
from records.store import Store
from rollout_bridge.engine.errors import EngineUnavailable
from tests.api_proxy.conftest import Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.api_proxy.pages.test_access import csrf_in
from tests.api_proxy.pages.test_sessions import begun
from tests.api_proxy.scripted_engine import ScriptedEngine
from tests.records.builders import (
    OWNER,
    REPLY,
    TRAINER,
    a_result,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    a_version,
    a_vote,
    claimed,
)

PATH = "/v1/runs/current/turns"
Trainer = Literal["here", "earlier program", "slime"]


@pytest.fixture
def teacher() -> ScriptedEngine:
    return ScriptedEngine()


async def trained(
    door: Door,
    hint: str = "use Celsius",
    text: str = "",
    *,
    by: Trainer = "here",
    version: int = 1,
    **changes: Any,
) -> str:
    """A turn that was trained under a hint; the teacher read it in two more ids."""
    store = door.store
    [mark] = door.rendering.tokenizer.encode("!", add_special_tokens=False)
    turn = a_turn(await a_session(store, "anonymous"), **changes)
    await store.record_turn(turn, scope="anonymous")
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    votes = (
        a_vote(0, hint=hint, text=text or "\\boxed{1} because of the unit"),
        a_vote(1, hint="a" * 30, rejected=HintRejection.TOO_LONG),
        a_vote(2, score=-1, hint=""),
        a_vote(3, score=None, hint="", error="timeout"),
    )
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id, hint, votes), None)
    assert await claimed(store, TurnState.SCORING) == [turn.turn_id]
    hinted = np.array([1, 2, 3, mark, mark, 4], dtype=np.int32)
    score = a_score(turn.turn_id, hint=hint, hinted_prompt_ids=hinted)
    assert await store.commit_scores(OWNER, [score])
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
    made, result = a_version(version), a_result(turn.turn_id)
    if by == "slime":
        await store.commit_handed_over(owner=TRAINER, version=made, turn_ids=[turn.turn_id])
        return turn.turn_id
    if by == "earlier program":
        result = replace(result, figures=None)
    await store.commit_step(version=made, results=[result])
    return turn.turn_id


async def test_each_token_has_its_numbers(door: Door) -> None:
    turn_id = await trained(door)
    turn = await door.turn(turn_id)
    found = (await door.client.get(f"{PATH}/{turn_id}")).json()
    signals = found["tokens"]["signals"]
    assert found["tokens"]["ids"] == [7, 8, 9]
    assert found["tokens"]["texts"] == [door.rendering.decode([one]) for one in (7, 8, 9)]
    assert signals["advantage"] == pytest.approx([-0.5, 0.0, 0.5])
    assert signals["policy"] == pytest.approx(turn.rollout_logprobs.tolist())
    assert signals["gap"] == pytest.approx((-0.25 - turn.rollout_logprobs).tolist())
    assert signals["version"] == [0.0, 0.0, 0.0]
    assert signals["ratio"] == pytest.approx([math.exp(-0.25), 1.0, math.exp(0.25)])
    assert signals["weight"] == [0.75, 0.75, 0.75]
    assert signals["mask"] == [1.0, 1.0, 1.0]
    assert signals["entropy"] == [0.0, 0.5, 1.0]
    assert signals["engine"] == [None, 0.125, 0.25]
    assert [one["version"] for one in found["samples"]] == [1]
    page = (await door.client.get(f"/ui/turns/{turn_id}")).text
    numbers = "Advantage: -0.5000; Ratio: 0.7788; Weight: 0.7500; Mask: 1; Entropy: 0.0000;"
    assert f'class="t sm4" title="Token 1, id 7. {numbers} Engine against' in page
    assert "Version 1 trained on it" in page
    by_policy = (await door.client.get(f"/ui/turns/{turn_id}?signal=policy")).text
    assert '<option value="policy" selected>' in by_policy
    assert 'class="t sm4" title="Token 1' in by_policy


async def test_each_signal_has_its_scale(door: Door) -> None:
    turn_id = await trained(door)
    by_ratio = (await door.client.get(f"/ui/turns/{turn_id}?signal=ratio")).text
    assert '<span class="t sp0">1</span>' in by_ratio
    assert '<span class="t sm4">0.7' in by_ratio
    assert '<span class="t sp4">1.2' in by_ratio
    engine = (await door.client.get(f"/ui/turns/{turn_id}?signal=engine")).text
    assert '<span class="t no">not known (1)</span>' in engine


async def test_a_step_that_reported_less_is_said(door: Door) -> None:
    """Trained before figures were stored; and by slime, which hands over ids alone."""
    old = await trained(door, by="earlier program")
    found = (await door.client.get(f"{PATH}/{old}")).json()
    assert found["tokens"]["signals"]["mask"] == [1.0, 1.0, 1.0]
    for name in ("ratio", "weight", "entropy", "engine"):
        assert found["tokens"]["signals"][name] == [None] * 3
        page = (await door.client.get(f"/ui/turns/{old}?signal={name}")).text
        assert "None of the tokens has this number.</strong> It was trained before" in page
    slime = await trained(door, by="slime", version=2)
    for name in ("advantage", "mask", "engine"):
        page = (await door.client.get(f"/ui/turns/{slime}?signal={name}")).text
        assert "Version 2 trained it" in page
        assert "slime&#39;s trainer does not report them" in page


async def test_log_probs_of_two_temperatures_make_no_gap(door: Door) -> None:
    turn_id = await trained(door, sampling={"temperature": 0.7})
    signals = (await door.client.get(f"{PATH}/{turn_id}")).json()["tokens"]["signals"]
    assert signals["gap"] == [None, None, None]
    assert None not in signals["teacher"] + signals["policy"]


async def test_a_long_prompt_is_cut_and_said_to_be(door: Door) -> None:
    messages = [{"role": "user", "content": f"number {number}."} for number in range(130)]
    turn_id = await trained(door, messages=messages)
    found = (await door.client.get(f"{PATH}/{turn_id}")).json()
    assert (found["earlier_messages"], len(found["messages"])) == (30, 100)
    page = (await door.client.get(f"/ui/turns/{turn_id}")).text
    assert "130 messages" in page
    assert "The first 30 are not shown." in page
    assert "number 129." in page
    assert "number 29." not in page


async def test_votes_say_why_their_hints_were_taken_or_not(door: Door) -> None:
    turn_id = await trained(door)
    votes = (await door.client.get(f"{PATH}/{turn_id}")).json()["verdict"]["votes"]
    assert [one["said"].split(":")[0] for one in votes] == [
        "for, and its hint was selected (longest)",
        "for, but its hint is longer than judge.max_hint_chars",
        "against",
        "failed",
    ]
    page = (await door.client.get(f"/ui/turns/{turn_id}")).text
    assert "\\boxed{1} because of the unit" in page


async def test_the_hinted_prompt_stands_beside_the_original(door: Door) -> None:
    turn_id = await trained(door)
    change = (await door.client.get(f"{PATH}/{turn_id}")).json()["hinted"]["change"]
    decode = door.rendering.decode
    assert (change["before"], change["removed"], change["added"], change["behind"]) == (
        decode([1, 2, 3]),
        "",
        "!!",
        decode([4]),
    )
    assert "<ins>!!</ins>" in (await door.client.get(f"/ui/turns/{turn_id}")).text


async def test_the_teacher_answers_the_hinted_prompt(
    door: Door, teacher: ScriptedEngine, store: Store, login: Login
) -> None:
    turn_id = await trained(door)
    client = await login("admin")
    teacher.script += [door.line("In Celsius, 21."), EngineUnavailable("down")]
    path = f"/ui/turns/{turn_id}/teacher"
    assert (await client.post(path)).status_code == 403
    page = (await client.get(f"/ui/turns/{turn_id}")).text
    assert "Ask what the teacher would have said" in page
    answered = await client.post(path, data={"csrf": csrf_in(page)})
    assert answered.status_code == 200
    assert "In Celsius, 21." in answered.text
    [prompt] = teacher.prompts
    assert len(prompt) == 6
    down = await client.post(path, data={"csrf": csrf_in(page)})
    assert down.status_code == 503
    assert sum((await store.counts()).values()) == 1


async def test_what_is_not_known_is_said(door: Door) -> None:
    turn_id = await recorded_only(door)
    found = (await door.client.get(f"{PATH}/{turn_id}")).json()
    assert found["tokens"]["signals"]["advantage"] == [None, None, None]
    assert found["hinted"] is None
    page = (await door.client.get(f"/ui/turns/{turn_id}")).text
    assert "None of the tokens has this number.</strong> No step has trained this answer." in page
    assert "The judge has not voted." in page
    assert "No hinted prompt was made for it." in page
    assert (await door.client.post(f"{PATH}/{turn_id}/teacher")).status_code == 409
    for query in ("signal=x", "candidate=x"):
        refused = await door.client.get(f"/ui/turns/{turn_id}?{query}")
        assert refused.status_code == 400
    assert (await door.client.get("/ui/turns/no-such")).status_code == 404


async def recorded_only(door: Door) -> str:
    turn = a_turn(await a_session(door.store, "anonymous"))
    await door.store.record_turn(turn, scope="anonymous")
    return turn.turn_id


async def test_a_tenant_sees_its_own_turns_alone(door: Door, store: Store, login: Login) -> None:
    session_id = await begun(store, "theirs", tenant_scope("other"))
    part = await store.session_part(session_id, after=None, limit=1)
    assert part is not None
    turn_id = part.turns[0].turn_id
    mine, admin = await login("acme"), await login("admin")
    for path in (f"/ui/turns/{turn_id}", f"{PATH}/{turn_id}"):
        assert (await mine.get(path)).status_code == 404
        assert "theirs" in (await admin.get(path)).text


@pytest.mark.parametrize("text", HOSTILE)
async def test_stored_text_stays_text(door: Door, text: str) -> None:
    turn_id = await trained(door, hint=text, text=text)
    page = await door.client.get(f"/ui/turns/{turn_id}")
    assert page.status_code == 200
    assert_harmless(page.text)
