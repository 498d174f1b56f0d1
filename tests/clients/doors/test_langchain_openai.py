"""langchain-openai over chat completions and Responses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import MAX_STEPS, USERS, check_recorded, run_tool


async def ask(model: Any, messages: list[BaseMessage], stream: bool) -> AIMessage:
    """One reply; pieces of a streamed one are added up."""
    if not stream:
        return await model.ainvoke(messages)
    whole: Any = None
    async for piece in model.astream(messages):
        whole = piece if whole is None else whole + piece
    return whole


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_a_tool_conversation(lab: Lab, responses: bool, stream: bool) -> None:
    messages: list[BaseMessage] = [SystemMessage(SYSTEM_PROMPT)]
    async with httpx.AsyncClient() as connection:
        chat = ChatOpenAI(
            model="policy",
            base_url=f"{lab.url}/v1",
            api_key=SecretStr("key"),
            temperature=0,
            use_responses_api=responses,
            http_async_client=connection,
        )
        model = chat.bind_tools(TOOLS)
        for text in USERS:
            messages.append(HumanMessage(text))
            for _ in range(MAX_STEPS):
                reply = await ask(model, messages, stream)
                messages.append(reply)
                messages += [
                    ToolMessage(run_tool(call["name"], call["args"]), tool_call_id=call["id"])
                    for call in reply.tool_calls
                ]
                if not reply.tool_calls:
                    break
    turns = await check_recorded(lab)
    assert reply.text == turns[-1].response["content"]
