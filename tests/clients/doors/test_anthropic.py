"""The anthropic SDK: whole and streamed messages with tools."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from examples.tool_lab.domain import SYSTEM_PROMPT
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import FUNCTIONS, MAX_STEPS, USERS, check_recorded, run_tool

TOOLS: list[Any] = [
    {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    for function in FUNCTIONS
]


async def ask(client: anthropic.AsyncAnthropic, messages: list[Any], stream: bool) -> Any:
    """One message."""
    request: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 96,
        "system": [{"type": "text", "text": SYSTEM_PROMPT, "cache_control": {"type": "ephemeral"}}],
        "tools": TOOLS,
        "messages": messages,
        "extra_body": {"temperature": 0},
    }
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_conversation(lab: Lab, stream: bool) -> None:
    history: list[Any] = []
    async with anthropic.AsyncAnthropic(base_url=lab.url, api_key="key") as client:
        for text in USERS:
            history.append({"role": "user", "content": text})
            for _ in range(MAX_STEPS):
                message = await ask(client, history, stream)
                history.append(message.to_param())
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": run_tool(block.name, block.input),
                    }
                    for block in message.content
                    if block.type == "tool_use"
                ]
                assert bool(results) == (message.stop_reason == "tool_use")
                if not results:
                    break
                history.append({"role": "user", "content": results})
        counted = await client.messages.count_tokens(
            model="policy", system=SYSTEM_PROMPT, tools=TOOLS, messages=history[:1]
        )
    turns = await check_recorded(lab)
    assert message.id == f"msg_{turns[-1].turn_id}"
    assert counted.input_tokens == len(turns[0].prompt_ids)
    assert message.usage.output_tokens == len(turns[-1].response_ids)
