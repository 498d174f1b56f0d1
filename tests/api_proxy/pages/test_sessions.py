"""*Sessions*: whose are listed, in what order, by which filters; a session with its branches."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from api_proxy.access.callers import tenant_scope
from records.names import DropReason, TurnState
from records.reading import browsing
from records.store import Store
from tests.api_proxy.conftest import Clock, Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.records.builders import a_session, a_turn, turn_in
from tests.records.hints.test_memory import objected

LIST = "/v1/runs/current/sessions"


async def listed(door: Door, query: str = "") -> list[str]:
    reply = await door.client.get(f"{LIST}?{query}")
    assert reply.status_code == 200, reply.text
    return [one["id"] for one in reply.json()["data"]]


async def begun(store: Store, name: str, scope: str = "anonymous") -> str:
    session_id = await a_session(store, scope)
    await store.record_turn(
        a_turn(session_id, messages=[{"role": "user", "content": name}]), scope=scope
    )
    return session_id


async def test_a_tenant_sees_its_own_sessions_alone(store: Store, login: Login) -> None:
    own = await begun(store, "mine", tenant_scope("acme"))
    other = await begun(store, "theirs", tenant_scope("other"))
    mine, admin = await login("acme"), await login("admin")
    assert [one["id"] for one in (await mine.get(LIST)).json()["data"]] == [own]
    assert [one["id"] for one in (await admin.get(LIST)).json()["data"]] == [other, own]
    of_tenant = (await admin.get(LIST, params={"tenant": "acme"})).json()["data"]
    assert [one["id"] for one in of_tenant] == [own]
    assert (await mine.get(LIST, params={"tenant": "other"})).json()["data"] == []
    for path in (f"/ui/sessions/{other}", f"{LIST}/{other}", f"{LIST}/no-such"):
        refused = await mine.get(path)
        assert refused.status_code == 404
        assert "theirs" not in refused.text
    shown = await mine.get(f"/ui/sessions/{own}")
    assert "mine" in shown.text
    assert "waits for its next state" in shown.text


async def test_sessions_are_found_by_what_their_turns_are(
    door: Door, store: Store, clock: Clock
) -> None:
    waiting = await begun(store, "waits")
    clock.now += 3600
    turn_id = await objected(store, scope="anonymous", drop=DropReason.NO_HINT)
    dropped = (await door.turn(turn_id)).session_id
    assert await listed(door) == [dropped, waiting]
    assert await listed(door, "state=awaiting_next_state") == [waiting]
    assert await listed(door, "reason=no_hint") == [dropped]
    assert await listed(door, "reason=stale") == []
    [span] = (await door.turn(turn_id)).version_spans
    assert await listed(door, f"version={span.version}") == [dropped, waiting]
    assert await listed(door, f"version={span.version + 1}") == []
    assert await listed(door, "until=1970-01-12T14:00") == [waiting]
    assert await listed(door, "since=1970-01-12T14:00") == [dropped]
    assert await listed(door, "since=1970-01-12T14:00&until=1970-01-12T14:00") == []
    page = (await door.client.get("/ui/sessions?reason=no_hint")).text
    assert "<option selected>no_hint</option>" in page
    assert "No session matches" in (await door.client.get("/ui/sessions?reason=stale")).text


async def test_sessions_are_found_by_user_and_teacher(door: Door, store: Store) -> None:
    expected = {}
    for user, teacher in (("ann", None), ("bob", "large"), (None, None)):
        session_id = await a_session(store, "anonymous")
        turn = a_turn(session_id, user_id=user, teacher_key=teacher)
        await store.record_turn(turn, scope="anonymous")
        expected[user] = session_id
    await store.index_texts(10)
    for more in ("", "&text=warm"):
        assert await listed(door, f"user=ann{more}") == [expected["ann"]]
        assert await listed(door, f"teacher=large{more}") == [expected["bob"]]
        assert await listed(door, f"user=ann&teacher=large{more}") == []
        assert await listed(door, f"user=nobody{more}") == []
        assert await listed(door, f"since=2100-01-01{more}") == []
    assert len(await listed(door)) == 3
    page = (await door.client.get("/ui/sessions", params={"user": HOSTILE[:300]})).text
    assert_harmless(page)
    assert "No session matches" in page


async def test_sessions_are_found_by_text(door: Door, store: Store) -> None:
    first = await begun(store, "How warm is it in Köln?")
    hostile = await begun(store, f"köln {HOSTILE}")
    page = (await door.client.get("/ui/sessions?text=warm")).text
    assert "2 turns are not searched" in page
    assert await store.index_texts(10) == 2
    assert await listed(door, "text=warm") == [first]
    assert await listed(door, "text=KÖLN&limit=1") == [hostile]
    reply = (await door.client.get(f"{LIST}?text=köln&limit=1")).json()
    assert await listed(door, f"text=köln&limit=1&after={reply['next']}") == [first]
    assert await listed(door, "text=warm&state=trained") == []
    match = (await door.client.get(f"{LIST}?text=warm")).json()["data"][0]["match"]
    assert match["excerpt"] == {
        "before": "How ",
        "found": "warm",
        "after": " is it in Köln?\nIt is 70 F.",
    }
    page = (await door.client.get("/ui/sessions?text=warm")).text
    assert "How <mark>warm</mark> is it" in page
    assert f"/ui/turns/{match['turn_id']}" in page
    assert "not searched" not in page
    assert_harmless((await door.client.get("/ui/sessions", params={"text": "köln"})).text)
    assert_harmless((await door.client.get("/ui/sessions", params={"text": HOSTILE[:300]})).text)
    assert "No session matches" in (await door.client.get("/ui/sessions?text=nowhere")).text
    for query, param in (("text=%3F", "text"), ("text=a&after=1_x", "after")):
        refused = await door.client.get(f"{LIST}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


async def test_the_page_says_how_many_texts_cannot_be_indexed(door: Door, store: Store) -> None:
    await begun(store, "How warm is it?")
    await begun(store, "poison")
    await store.writer.run(
        lambda connection: connection.execute(
            text(
                "CREATE TRIGGER refuses BEFORE INSERT ON turn_words_0_content "
                "WHEN new.c0 LIKE '%poison%' BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        )
    )
    await store.index_texts(10)
    page = (await door.client.get("/ui/sessions?text=warm")).text
    assert "1 turns are never searched: their text cannot be indexed" in page
    assert "being indexed" not in page
    assert (await door.client.get(f"{LIST}?text=warm")).json()["not_indexable"] == 1


async def test_a_tenant_finds_texts_of_its_own(store: Store, login: Login) -> None:
    own = await begun(store, "celsius", tenant_scope("acme"))
    await begun(store, "celsius", tenant_scope("other"))
    await store.index_texts(10)
    found = (await (await login("acme")).get(f"{LIST}?text=celsius")).json()
    assert [one["id"] for one in found["data"]] == [own]
    assert (found["examined"], found["not_indexed"], found["not_indexable"]) == (1, 0, 0)


async def test_a_list_goes_on_where_it_stopped(
    door: Door, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [await begun(store, str(number)) for number in range(5)][::-1]
    seen, after = [], ""
    for _ in range(3):
        page = (await door.client.get(LIST, params={"limit": 2, "after": after})).json()
        seen += [one["id"] for one in page["data"]]
        after = page["next"]
    assert seen == ids
    assert after is None
    monkeypatch.setattr(browsing, "MOST_EXAMINED", 3)
    page = (await door.client.get(LIST, params={"reason": "stale"})).json()
    assert (page["data"], page["examined"]) == ([], 3)
    rest = (await door.client.get(LIST, params={"reason": "stale", "after": page["next"]})).json()
    assert (rest["examined"], rest["next"]) == (2, None)


@pytest.mark.parametrize(
    "query", ["state=x", "reason=x", "version=x", "since=x", "until=x", "after=x", "limit=0"]
)
async def test_what_cannot_be_asked_is_refused(door: Door, query: str) -> None:
    for path in (LIST, "/ui/sessions"):
        refused = await door.client.get(f"{path}?{query}")
        assert refused.status_code == 400
        assert query.partition("=")[0] in refused.text


async def test_a_session_is_a_conversation_with_branches(door: Door) -> None:
    door.will_say("It is 20 degrees.", "It is warm.", "In Celsius, 20.")
    question = [{"role": "user", "content": "How warm is it?"}]
    answer, first = await door.say(question, {"x-session-id": "weather"})
    asked = [*question, answer, {"role": "user", "content": "In words?"}]
    _, second = await door.say(asked, {"x-session-id": "weather"})
    again = [*question, answer, {"role": "user", "content": "Which unit?"}]
    _, third = await door.say(again, {"x-session-id": "weather"})
    path = f"{LIST}/{first.session_id}"
    found = (await door.client.get(path)).json()
    assert found["name"] == "weather"
    assert [one["turn_id"] for one in found["turns"]] == [
        one.turn_id for one in (first, second, third)
    ]
    assert [one["is_branch"] for one in found["turns"]] == [False, False, True]
    assert [texts(one) for one in found["turns"]] == [
        (["How warm is it?"], "It is 20 degrees."),
        (["In words?"], "It is warm."),
        (["Which unit?"], "In Celsius, 20."),
    ]
    assert found["turns"][0]["state"] == TurnState.JUDGING
    page = (await door.client.get(f"/ui/sessions/{first.session_id}")).text
    assert "another branch" in page
    assert page.count("In words?") == 1
    part = (await door.client.get(path, params={"limit": 2})).json()
    assert part["next"] == second.turn_id
    rest = (await door.client.get(path, params={"limit": 2, "after": part["next"]})).json()
    assert [one["turn_id"] for one in rest["turns"]] == [third.turn_id]
    assert (await door.client.get(path, params={"after": "no-such"})).status_code == 404


async def test_a_session_says_which_versions_trained_on_it(door: Door, store: Store) -> None:
    session_id = await a_session(store)
    untrained = (await door.client.get(f"{LIST}/{session_id}")).json()
    assert untrained["trained_versions"] == []
    await turn_in(store, TurnState.TRAINED, session_id=session_id)
    found = (await door.client.get(f"{LIST}/{session_id}")).json()
    assert found["trained_versions"] == [found["turns"][0]["version"]] != [None]
    page = (await door.client.get(f"/ui/sessions/{session_id}")).text
    assert f'its turns: <a href="/ui/sessions?version={found["trained_versions"][0]}">' in page


def texts(turn: dict[str, Any]) -> tuple[list[str], str]:
    return [one["text"] for one in turn["messages"]], turn["response"]["text"]


async def test_long_prompts_and_messages_are_cut_and_said_to_be(door: Door, store: Store) -> None:
    session_id = await a_session(store, "anonymous")
    messages = [{"role": "user", "content": f"{number} " + "x" * 5000} for number in range(20)]
    await store.record_turn(a_turn(session_id, messages=messages), scope="anonymous")
    [turn] = (await door.client.get(f"{LIST}/{session_id}")).json()["turns"]
    shown = [one["text"].split()[0] for one in turn["messages"]]
    assert turn["earlier_messages"] + len(shown) == 20
    assert shown[-1] == "19"
    assert turn["messages"][-1]["cut_characters"] == 5003 - 4000
    page = (await door.client.get(f"/ui/sessions/{session_id}")).text
    assert f"{turn['earlier_messages']} earlier messages are not shown" in page


@pytest.mark.parametrize("text", HOSTILE)
async def test_what_is_stored_stays_text(door: Door, store: Store, text: str) -> None:
    name = text.replace("\x00", "")
    session_id = await store.ensure_session(scope=name, external_id=name)
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": text, "content": text + "\ud800"},
    ]
    response = {"role": "assistant", "content": text, "tool_calls": [call]}
    turn = a_turn(session_id, messages=messages, response=response)
    await store.record_turn(turn, scope=name)
    for path in ("/ui/sessions", f"/ui/sessions/{session_id}", f"{LIST}/{session_id}"):
        page = await door.client.get(path)
        assert page.status_code == 200, page.text
        if path.startswith("/ui"):
            assert_harmless(page.text)
