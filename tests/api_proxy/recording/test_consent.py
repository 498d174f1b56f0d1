"""What a key consents to: trained on, only recorded, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, text

from records.errors import StoreUnavailable
from records.keys import Keys
from records.names import Consent, DropReason, TurnState
from records.store import Store
from tests.api_proxy.conftest import Clock, Door

QUESTION = {"role": "user", "content": "What is the weather in Paris, please?"}
REACTION = {"role": "user", "content": "No, in Celsius."}
ANSWER = "It is 70 degrees, and the sun is shining."


@pytest.fixture
def new_key(door: Door, store: Store, clock: Clock) -> Callable[..., Any]:
    async def make(consent: Consent) -> dict[str, str]:
        _, made = await Keys(store, clock).create(actor="test", tenant="acme", consent=consent)
        clock.now += door.app.state.service.config.key_refresh_s
        return {"authorization": f"Bearer {made}"}

    return make


def everything(connection: Connection) -> str:
    """Every value of the tables that hold what was said."""
    tables = ("sessions", "message_nodes", "message_variants", "turns", "turn_tokens", "toolsets")
    return repr([[*connection.execute(text(f"SELECT * FROM {table}"))] for table in tables])


async def test_a_record_only_turn_is_kept_and_never_trains(
    door: Door, store: Store, new_key: Callable[..., Any]
) -> None:
    headers = await new_key(Consent.RECORD)
    door.will_say(ANSWER, "21.")
    message, turn = await door.say([QUESTION], headers)
    assert (turn.state, turn.drop_reason) == (TurnState.DROPPED, DropReason.RECORD_ONLY)
    assert turn.response["content"] == ANSWER
    assert len(turn.response_ids)
    _, following = await door.say([QUESTION, message, REACTION], headers)
    assert following.session_id == turn.session_id
    assert following.parent_turn_id == turn.turn_id
    await door.app.state.service.recorder.drain()
    for state in (TurnState.JUDGING, TurnState.SCORING):
        assert await store.claim(state, owner="x", limit=9, ttl_s=60.0) == []
    assert (await store.drops())[DropReason.RECORD_ONLY] == 2
    told = door.app.state.service.metrics.exposition().decode()
    assert 'opd_turns_total{drop_reason="record_only"} 2.0' in told


async def test_what_is_only_recorded_is_no_feedback_on_other_turns(
    door: Door, new_key: Callable[..., Any]
) -> None:
    trains, records = await new_key(Consent.TRAIN), await new_key(Consent.RECORD)
    door.will_say(ANSWER, "21.", "21.")
    message, turn = await door.say([QUESTION], trains)
    await door.say([QUESTION, message, REACTION], records)
    await door.app.state.service.recorder.drain()
    assert (await door.turn(turn.turn_id)).next_state == []
    # Who consents may still give it.
    await door.say([QUESTION, message, REACTION], trains)
    await door.app.state.service.recorder.drain()
    assert (await door.turn(turn.turn_id)).next_state == [REACTION]


@pytest.mark.parametrize("consent", [Consent.RECORD, Consent.NONE])
async def test_feedback_of_a_key_without_consent_is_refused(
    door: Door, new_key: Callable[..., Any], consent: Consent
) -> None:
    trains, other = await new_key(Consent.TRAIN), await new_key(consent)
    door.will_say(ANSWER)
    _, turn = await door.say([QUESTION], trains)
    body = {"response_id": turn.turn_id, "text": "Wrong."}
    refused = await door.client.post("/v1/feedback", json=body, headers=other)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_consent")
    assert (await door.turn(turn.turn_id)).next_state == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_without_consent_nothing_is_kept(
    door: Door, store: Store, new_key: Callable[..., Any], is_streamed: bool
) -> None:
    trains, keeps_nothing = await new_key(Consent.TRAIN), await new_key(Consent.NONE)
    door.will_say(ANSWER, "Twenty-one.")
    message, turn = await door.say([QUESTION], trains)
    await door.app.state.service.recorder.drain()
    before = await store.writer.run(everything)
    assert "Paris" in before
    secret = {"role": "user", "content": "My secret is xyzzy."}
    headers = {**keeps_nothing, "x-session-id": "hidden", "x-session-done": "true"}
    answered = await door.post(
        [QUESTION, message, secret], headers, stream=is_streamed, user="someone"
    )
    assert answered.status_code == 200
    assert ("[DONE]" if is_streamed else "Twenty-one.") in answered.text
    await door.app.state.service.recorder.drain()
    assert await store.writer.run(everything) == before
    assert (await door.turn(turn.turn_id)).next_state == []
    told = door.app.state.service.metrics.exposition().decode()
    assert "opd_unrecorded_turns_total 1.0" in told


async def test_without_consent_nothing_is_spilled_either(
    door: Door,
    store: Store,
    new_key: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers = await new_key(Consent.NONE)
    door.will_say(ANSWER)
    assert (await door.client.get("/v1/models", headers=headers)).status_code == 200

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(store, "read", fail)
        broken.setattr(store.writer, "run_bulk", fail)
        assert (await door.post([QUESTION], headers)).status_code == 200
        await door.app.state.service.recorder.drain()
        assert not door.app.state.service.spool.is_waiting


async def test_a_response_that_is_not_kept_cannot_be_asked_for_again(
    door: Door, new_key: Callable[..., Any]
) -> None:
    headers = await new_key(Consent.NONE)
    door.will_say(ANSWER)
    asked = {"model": "policy", "input": "hi"}
    made = await door.client.post("/v1/responses", json=asked, headers=headers)
    assert made.status_code == 200
    again = await door.client.get(f"/v1/responses/{made.json()['id']}", headers=headers)
    assert again.status_code == 404
