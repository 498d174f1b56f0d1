"""*Review*: whose hints are shown, what approving, editing and rejecting them does."""

from __future__ import annotations

from typing import Any

import pytest

from api_proxy.access.callers import tenant_scope
from records.feedback.feedback import Feedback
from records.names import DropReason, TurnState
from records.store import Store
from tests.api_proxy.conftest import Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.api_proxy.pages.test_access import csrf_in
from tests.records.builders import HINT, OWNER, SCOPE, a_verdict, state_of
from tests.records.feedback.test_reviews import proposed


def form_of(one: dict[str, Any], page: str, **changes: str) -> dict[str, str]:
    """What the page's form sends, as browsers send it."""
    text = one["hint"].replace("\n", "\r\n")
    fields = {"csrf": csrf_in(page), "judged_at": str(one["judged_at"]), "decision": "approve"}
    return {**fields, "shown": text, "hint": text, **changes}


async def waiting(door: Door) -> list[dict[str, Any]]:
    return (await door.client.get("/v1/runs/current/review")).json()["data"]


async def test_a_tenant_decides_on_its_own_hints_alone(store: Store, login: Login) -> None:
    mine = (await proposed(store, tenant_scope("acme"))).turn_id
    theirs = (await proposed(store, tenant_scope("other"))).turn_id
    acme, admin = await login("acme"), await login("admin")
    page = (await acme.get("/ui/review")).text
    assert mine in page
    assert theirs not in page
    assert "I wanted Celsius." in page
    listed = (await admin.get("/v1/runs/current/review")).json()["data"]
    assert [one["turn_id"] for one in listed] == [theirs, mine]
    reply = await acme.post(f"/ui/review/{theirs}", data=form_of(listed[0], page))
    assert reply.status_code == 404
    forged = form_of(listed[1], page) | {"csrf": "wrong"}
    assert (await acme.post(f"/ui/review/{mine}", data=forged)).status_code == 403
    assert (await acme.post(f"/ui/review/{mine}", data=form_of(listed[1], page))).status_code == 303
    [hint] = await store.hints()
    assert hint.text == HINT
    turn = (await acme.get(f"/ui/turns/{mine}")).text
    assert "approved it on" in turn
    assert "waits for a person" in (await admin.get(f"/ui/turns/{theirs}")).text
    counted = (await acme.get("/ui/review")).text
    assert "1 of 1 approved unchanged" in counted
    assert "Decided so far" not in (await (await login("other")).get("/ui/review")).text


async def test_people_edit_and_reject(door: Door, store: Store) -> None:
    edited, rejected = [(await proposed(store)).turn_id for _ in range(2)]
    page = (await door.client.get("/ui/review")).text
    for one in await waiting(door):
        changes = {"hint": "  Use\r\nCelsius. "} if one["turn_id"] == edited else {}
        changes |= {"decision": "reject"} if one["turn_id"] == rejected else {}
        form = form_of(one, page, **changes)
        path = f"/ui/review/{one['turn_id']}"
        assert (await door.client.post(path, data=form)).status_code == 303
        # A second click.
        again = await door.client.post(path, data=form)
        assert again.status_code == 409
        assert "does not wait for a review" in again.text
    assert [one.text for one in await store.hints()] == ["Use\nCelsius."]
    assert await store.drops() == {DropReason.REVIEW_REJECTED: 1}
    counted = (await door.client.get("/v1/runs/current/review")).json()
    assert counted["decisions"] == {"approved": 0, "edited": 1, "rejected": 1}
    metrics = (await door.client.get("/metrics")).text
    assert 'opd_reviews_total{decision="edited"} 1.0' in metrics
    assert "No hint is waiting." in (await door.client.get("/ui/review")).text


async def test_json_decides_too(door: Door, store: Store) -> None:
    turn_id = (await proposed(store)).turn_id
    path, [one] = f"/v1/runs/current/review/{turn_id}", await waiting(door)
    body = {"approve": True, "judged_at": one["judged_at"]}
    for wrong, status in (
        ({}, 400),
        ({**body, "hint": " "}, 400),
        ({**body, "hint": "x" * 4001}, 400),
        ({**body, "hint": "x" * 60_000}, 413),
        ({**body, "approve": "yes"}, 400),
        ({**body, "other": 1}, 400),
        ({**body, "judged_at": 1.0}, 409),
    ):
        reply = await door.client.post(path, json=wrong)
        assert reply.status_code == status, reply.text
        assert reply.json()["error"]["message"]
    assert await state_of(store, turn_id) is TurnState.REVIEWING
    reply = (await door.client.post(path, json=body)).json()
    assert (reply["decision"], reply["hint"], reply["proposed"]) == ("approved", HINT, HINT)
    assert (await door.client.post(f"{path}x", json=body)).status_code == 404


async def test_long_hints_of_any_script_can_be_decided_on(door: Door, store: Store) -> None:
    turn_id = (await proposed(store)).turn_id
    page, [one] = (await door.client.get("/ui/review")).text, await waiting(door)
    long = "摄" * 4000
    form = form_of(one, page, shown=long, hint=long[:-1])
    assert (await door.client.post(f"/ui/review/{turn_id}", data=form)).status_code == 303
    assert [len(hint.text) for hint in await store.hints()] == [3999]


async def test_an_empty_hint_is_refused(door: Door, store: Store) -> None:
    turn_id = (await proposed(store)).turn_id
    page, [one] = (await door.client.get("/ui/review")).text, await waiting(door)
    for changes in ({"hint": " "}, {"decision": "maybe"}, {"judged_at": "soon"}):
        form = form_of(one, page, **changes)
        reply = await door.client.post(f"/ui/review/{turn_id}", data=form)
        assert reply.status_code == 400, changes
        assert "text/html" in reply.headers["content-type"]
    assert await state_of(store, turn_id) is TurnState.REVIEWING


@pytest.mark.parametrize("text", HOSTILE)
async def test_what_is_stored_stays_text_and_is_approved_as_it_is(
    door: Door, store: Store, text: str
) -> None:
    turn_id = (await proposed(store)).turn_id
    # The judge's own text, whatever is in it.
    await store.add_feedback(SCOPE, turn_id, Feedback(text="Celsius, always."))
    [turn] = await store.claim(TurnState.JUDGING, owner=OWNER, limit=1, ttl_s=60)
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id, text), None, review=True)
    page = await door.client.get("/ui/review")
    assert page.status_code == 200
    assert_harmless(page.text)
    [one] = await waiting(door)
    form = form_of(one, page.text, hint="as shown", shown="as shown")
    assert (await door.client.post(f"/ui/review/{turn_id}", data=form)).status_code == 303
    turn = (await door.client.get(f"/v1/runs/current/turns/{turn_id}")).json()
    assert turn["review"]["decision"] == "approved"
    assert turn["verdict"]["hint"] == turn["review"]["hint"]
