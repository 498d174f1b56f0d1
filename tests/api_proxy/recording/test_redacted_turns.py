"""Secrets at the endpoint: the agent has its reply as it was, the store holds none of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from records.config import RedactionConfig
from records.names import DropReason, TurnState
from records.privacy.redaction import Redactor
from tests.api_proxy.conftest import Door
from tests.messages import user

KEY = "AKIA" + "IOSFODNN7EXAMPLE"


async def test_a_secret_reaches_the_agent_and_not_the_store(door: Door) -> None:
    door.will_say("Hello.", f"Your key is {KEY}.", "As I said.")
    history = [user("Hi")]
    hello, first = await door.say(history)
    history += [hello, user("What is my key?")]
    told, second = await door.say(history)
    assert told["content"] == f"Your key is {KEY}."
    assert second.response["content"] == "Your key is [aws_key]."
    assert second.drop_reason is DropReason.SENSITIVE
    # The conversation goes on in the same session, and what carries the key does not train.
    history += [told, user("Thanks")]
    _, third = await door.say(history)
    assert (third.session_id, third.parent_turn_id) == (second.session_id, second.turn_id)
    assert third.drop_reason is DropReason.SENSITIVE
    assert KEY not in str([turn.messages for turn in (first, second, third)])
    assert (await door.turn(first.turn_id)).state is TurnState.JUDGING
    metrics = (await door.client.get("/metrics")).text
    assert 'opd_findings_total{kind="aws_key",mode="redact"}' in metrics
    assert 'opd_turns_total{drop_reason="sensitive"} 2.0' in metrics


async def test_a_secret_in_the_reaction_is_judged_without_it(door: Door) -> None:
    door.will_say("Hello.", "Sorry.")
    hello, first = await door.say([user("Hi")])
    _, second = await door.say([user("Hi"), hello, user(f"No, use {KEY}")])
    assert (await door.turn(first.turn_id)).next_state == [user("No, use [aws_key]")]
    assert (await door.turn(first.turn_id)).state is TurnState.JUDGING
    assert second.parent_turn_id == first.turn_id


async def test_a_secret_is_in_none_of_the_files(door: Door) -> None:
    door.will_say("Hello.")
    await door.say([user(f"Remember {KEY}")])
    path = door.store.config.sqlite_path
    assert path is not None
    for file in path.parent.glob("records.db*"):
        if file.is_file():
            assert KEY.encode() not in file.read_bytes()


class WatchedRedactor(Redactor):
    """Notes where lengths are counted."""

    def __init__(self) -> None:
        super().__init__(RedactionConfig())
        self.is_in_loop: list[bool] = []

    def refused_length(self, *values: Any) -> int | None:
        self.is_in_loop.append(threading.current_thread() is threading.main_thread())
        return super().refused_length(*values)


async def test_a_long_text_is_counted_beside_the_event_loop(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    redactor = WatchedRedactor()
    monkeypatch.setattr(door.store, "redactor", redactor)
    await door.post([user("hello there " * 1_500)])
    assert redactor.is_in_loop == [False]


async def test_more_text_than_is_looked_through_is_refused_before_anything_else(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    redactor = Redactor(RedactionConfig(max_chars=1000))
    monkeypatch.setattr(door.store, "redactor", redactor)
    body = {"model": "policy", "messages": [user("x" * 600), user("y" * 600)]}
    response = await door.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert "more than 1000 characters" in error["message"]
    metrics = (await door.client.get("/metrics")).text
    assert "opd_redaction_refused_total 1.0" in metrics
    assert 'opd_links_total{how="first"}' not in metrics
    path = door.store.config.sqlite_path
    assert path is not None
    assert b"xxxxxxxx" not in path.read_bytes()


@pytest.mark.parametrize("settings", [{"max_running": 1}])
async def test_more_text_than_is_looked_through_waits_for_no_place(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door.store, "redactor", Redactor(RedactionConfig(max_chars=1000)))
    door.engine.gate = asyncio.Event()
    door.will_say("Hello.")
    holding = asyncio.create_task(door.post([user("Hi")]))
    while not door.engine.prompts:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        refused = await door.post([user("x" * 1001)])
    assert refused.status_code == 400
    door.engine.gate.set()
    assert (await holding).status_code == 200
