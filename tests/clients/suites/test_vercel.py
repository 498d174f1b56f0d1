"""The Vercel AI SDK runs its tool loop, whole and streamed, through the three doors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.suites.commands import documented, run
from tests.clients.suites.conftest import NODE
from tests.clients.suites.endpoint import Endpoint, call, results, text_of

USERS = ("What is the weather in Karo?", "No, in Milu and in Tasa, please.")
RESULT = '{"temp_c":21,"sky":"sun"}'
ANSWERS = ["It is 21 degrees in Karo.", "It is 21 degrees in both."]


async def converse(endpoint: Endpoint, home: Path, door: str, form: str) -> list[dict[str, Any]]:
    """What the SDK made of each of `USERS`."""
    output = await run(
        *("node", NODE / "vercel_agent.mjs", door, form),
        folder=home,
        home=home,
        SERVED_URL=endpoint.url,
        USERS=json.dumps(USERS),
        RESULT=RESULT,
    )
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("door", ["chat", "responses", "messages"])
@pytest.mark.parametrize("form", ["whole", "streamed"])
async def test_a_tool_loop_is_one_session_and_trains(
    endpoint: Endpoint, tmp_path: Path, door: str, form: str
) -> None:
    side_by_side = call("get_weather", city="Milu") + "\n" + call("get_weather", city="Tasa")
    endpoint.will_say(
        call("get_weather", city="Karo"),
        ANSWERS[0],
        "I ask again.\n" + side_by_side,
        ANSWERS[1],
    )
    told = await converse(endpoint, tmp_path, door, form)
    assert [reply["answer"] for reply in told] == ANSWERS
    assert [reply["calls"] for reply in told] == [
        [[{"city": "Karo"}], []],
        [[{"city": "Milu"}, {"city": "Tasa"}], []],
    ]
    assert [reply["finish"] for reply in told] == ["stop", "stop"]
    turns = await endpoint.check_one_conversation(4)
    assert results(turns[0]) == [RESULT]
    assert results(turns[2]) == [RESULT, RESULT]
    (reaction,) = turns[1].next_state
    assert text_of(reaction) == USERS[1]
    sampled = [len(turns[index].response_ids) for index in (1, 3)]
    assert [reply["output_tokens"] for reply in told] == sampled


async def test_the_documented_code_runs(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.will_say(call("get_weather", city="Karo"), ANSWERS[0])
    code = documented("Vercel AI SDK", "js", endpoint.url)
    # From the folder whose packages the code names.
    output = await run("node", "--input-type=module", "-e", code, folder=NODE, home=tmp_path)
    assert output.strip() == ANSWERS[0]
    await endpoint.check_one_conversation(2)
