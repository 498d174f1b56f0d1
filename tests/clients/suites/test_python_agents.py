"""Agents of other projects hold a conversation with a tool: CrewAI, LiteLLM, AutoGen, LangGraph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.suites.commands import run
from tests.clients.suites.conftest import HERE, PYTHON
from tests.clients.suites.endpoint import Endpoint, call, results, text_of

USERS = ("What is the weather in Karo?", "No, in Milu, please.")
RESULT = '{"temp_c": 21, "sky": "sun"}'
ANSWERS = ["It is 21 degrees in Karo.", "It is 21 degrees in Milu, too."]
AGENTS = [
    ("autogen",),
    ("langgraph", "chat"),
    ("langgraph", "responses"),
    ("langgraph", "messages"),
    ("litellm", "chat"),
    ("litellm", "responses"),
    ("litellm", "messages"),
    ("crewai",),
]
ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "LANGSMITH_TRACING": "false",
}
"""No reports home, and nothing fetched."""


async def converse(endpoint: Endpoint, folder: Path, name: str, *arguments: str) -> list[str]:
    """The agent's answers to `USERS`."""
    output = await run(
        *(PYTHON, HERE / "agents" / f"{name}_agent.py", *arguments),
        folder=folder,
        home=folder,
        SERVED_URL=endpoint.url,
        USERS=json.dumps(USERS),
        RESULT=RESULT,
        **ALONE,
    )
    told = [line for line in output.splitlines() if line.startswith('{"answer": ')]
    return [json.loads(line)["answer"] for line in told]


@pytest.mark.parametrize("agent", AGENTS, ids="-".join)
async def test_a_conversation_with_a_tool(
    endpoint: Endpoint, tmp_path: Path, agent: tuple[str, ...]
) -> None:
    endpoint.will_say(
        call("get_weather", city="Karo"),
        ANSWERS[0],
        "I ask again.\n" + call("get_weather", city="Milu"),
        ANSWERS[1],
    )
    assert await converse(endpoint, tmp_path, *agent) == ANSWERS
    turns = await endpoint.check_one_conversation(4)
    assert results(turns[0]) == results(turns[2]) == [RESULT]
    (reaction,) = turns[1].next_state
    # CrewAI writes "Current Task: " before it.
    assert text_of(reaction).endswith(USERS[1])
