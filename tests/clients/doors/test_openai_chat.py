"""The openai SDK's chat completions: whole, and streamed by its own helper."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import MAX_STEPS, USERS, check_recorded, run_tool


async def ask(client: openai.AsyncOpenAI, messages: list[Any], stream: bool) -> Any:
    """One completion."""
    request: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 0}
    if not stream:
        return await client.chat.completions.create(**request)
    async with client.chat.completions.stream(**request) as events:
        async for _ in events:
            pass
        return await events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_conversation(lab: Lab, stream: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
    async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="key") as client:
        for text in USERS:
            messages.append({"role": "user", "content": text})
            for _ in range(MAX_STEPS):
                completion = await ask(client, messages, stream)
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                messages += [
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": run_tool(
                            call.function.name, json.loads(call.function.arguments)
                        ),
                    }
                    for call in message.tool_calls or ()
                ]
                if not message.tool_calls:
                    break
    turns = await check_recorded(lab)
    assert completion.id == f"chatcmpl-{turns[-1].turn_id}"
    assert message.content == turns[-1].response["content"]
