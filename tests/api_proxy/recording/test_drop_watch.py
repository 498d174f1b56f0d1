"""What drops every turn of a session or key is said in the log, in metrics and by /readyz; and an
agent whose tools hold its vendor's own address trains.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from records.config import RedactionConfig
from records.names import DropReason, TurnState
from records.privacy.findings import digest
from records.privacy.redaction import Redactor
from tests.api_proxy.conftest import Door
from tests.messages import user

MAIL = "ann.lee@kestrel-freight.com"


def bash(description: str) -> dict[str, Any]:
    """A tool as coding agents have it."""
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    function = {"name": "Bash", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CO_AUTHOR = "End commits with: Co-Authored-By: Claude <noreply@anthropic.com>. Ask {}."


async def talk(door: Door, number: int, **fields: Any) -> list[str]:
    """A conversation of some turns; their ids."""
    door.will_say(*(f"Answer {one}." for one in range(number)))
    history, turn_ids = [user("Hi")], []
    for one in range(number):
        answer, turn = await door.say(history, **fields)
        history += [answer, user(f"And {one}?")]
        turn_ids.append(turn.turn_id)
    return turn_ids


async def warnings(door: Door) -> list[str]:
    return (await door.client.get("/readyz")).json()["warnings"]


async def gauge(door: Door) -> float:
    text = (await door.client.get("/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith("opd_dropping_all ")]
    return float(line.split()[1])


async def test_an_agent_with_its_vendors_address_in_a_tool_trains(door: Door) -> None:
    turn_ids = await talk(door, 3, tools=[bash(CO_AUTHOR.format("support@anthropic.com"))])
    states = [(await door.turn(turn_id)).state for turn_id in turn_ids]
    assert states == [TurnState.JUDGING, TurnState.JUDGING, TurnState.AWAITING_NEXT_STATE]
    assert await warnings(door) == []
    assert await gauge(door) == 0


async def test_an_address_in_a_tool_that_drops_every_turn_is_said_at_once(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [bash("Runs it."), bash(CO_AUTHOR.format(MAIL))]
    with caplog.at_level(logging.WARNING, "api_proxy.recording.drop_watch"):
        turn_ids = await talk(door, 5, tools=tools)
    turns = [await door.turn(turn_id) for turn_id in turn_ids]
    assert {turn.drop_reason for turn in turns} == {DropReason.SENSITIVE}
    said = await warnings(door)
    assert len(said) == 2  # the client and the session
    for line in (*said, *caplog.messages):
        assert "sensitive (email in tools[1].function.description)" in line
        assert "kestrel" not in line
        assert digest(MAIL) not in line
    assert len(caplog.messages) == 1  # not for each turn
    assert await gauge(door) == 2
    status = await door.client.get("/readyz")
    assert (status.status_code, status.json()["status"]) == (200, "ok")


async def test_an_allowed_address_in_a_tool_trains(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowing = Redactor(RedactionConfig(allow=[digest(MAIL)]))
    monkeypatch.setattr(door.store, "redactor", allowing)
    [first, _] = await talk(door, 2, tools=[bash(CO_AUTHOR.format(MAIL))])
    assert (await door.turn(first)).state is TurnState.JUDGING


async def test_one_turn_that_is_kept_ends_the_warning_of_its_client(door: Door) -> None:
    await talk(door, 3, temperature=0)
    assert any("distribution_modified" in line for line in await warnings(door))
    await talk(door, 1)
    [line] = await warnings(door)  # that session still has none
    assert line.startswith("every turn of session ")


async def test_what_is_decided_later_is_said_too(door: Door) -> None:
    for number in range(3):
        door.will_say("Alone.")
        _, turn = await door.say([user(f"Question {number}")])
        await door.store.close_session(turn.session_id, "idle")
    watch = door.app.state.service.drop_watch
    watch.read(await door.store.recent_outcomes())
    [line] = await warnings(door)
    assert line.startswith("every turn of clients without a key since ")
    assert line.endswith("was dropped: no_next_state (idle), 3")
