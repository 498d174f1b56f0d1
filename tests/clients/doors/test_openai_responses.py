"""The openai SDK's Responses client: whole and streamed, by items or by the proxy's state."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from examples.tool_lab.domain import SYSTEM_PROMPT
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import FUNCTIONS, MAX_STEPS, USERS, check_recorded, run_tool

TOOLS: list[Any] = [{"type": "function", **function, "strict": False} for function in FUNCTIONS]


async def ask(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """One response."""
    request: dict[str, Any] = {
        "model": "policy",
        "instructions": SYSTEM_PROMPT,
        "tools": TOOLS,
        "temperature": 0,
        **fields,
    }
    if not stream:
        return await client.responses.create(**request)
    async with client.responses.stream(**request) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


def results(response: Any) -> list[dict[str, Any]]:
    """The outputs of the tools that a response calls."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": run_tool(item.name, json.loads(item.arguments)),
        }
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("keeps_history", [True, False], ids=["items", "previous_response_id"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_conversation(lab: Lab, stream: bool, keeps_history: bool) -> None:
    history: list[Any] = []
    previous: dict[str, str] = {}
    async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="key") as client:
        for text in USERS:
            new: list[Any] = [{"role": "user", "content": text}]
            for _ in range(MAX_STEPS):
                history += new
                given = history if keeps_history else new
                response = await ask(client, stream, input=given, **previous)
                history += [item.model_dump(exclude_none=True) for item in response.output]
                if not keeps_history:
                    previous = {"previous_response_id": response.id}
                new = results(response)
                if not new:
                    break
    turns = await check_recorded(lab)
    assert response.id == f"resp_{turns[-1].turn_id}"
    assert response.output_text == turns[-1].response["content"]
