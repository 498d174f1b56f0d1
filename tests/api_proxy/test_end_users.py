"""Whom a request is for, in the words of each API, so that it can be forgotten for that user."""

from __future__ import annotations

from typing import Any

import pytest

from records.care.deletion import find_sessions
from tests.api_proxy.conftest import Door
from tests.records.looking import list_turns

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
RESPONSES = {"input": "Hi"}
MESSAGES = {**CHAT, "max_tokens": 50}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {**CHAT, "user": "ann"}),
        ("chat/completions", {**CHAT, "safety_identifier": "ann", "user": "old"}),
        ("responses", {**RESPONSES, "safety_identifier": "ann"}),
        ("messages", {**MESSAGES, "metadata": {"user_id": "ann"}}),
    ],
)
async def test_a_session_is_found_by_its_user(door: Door, route: str, body: dict[str, Any]) -> None:
    door.will_say("Hello.")
    response = await door.client.post(f"/v1/{route}", json={"model": "policy", **body})
    assert response.status_code == 200, response.text
    [ref] = await list_turns(door.store)
    assert await door.store.read(find_sessions, user="ann") == [ref.session_id]
