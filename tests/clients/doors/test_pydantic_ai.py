"""pydantic-ai over both of its OpenAI models: chat and Responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic_ai import Agent, Tool
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.tool_lab.domain import SYSTEM_PROMPT
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import FUNCTIONS, USERS, check_recorded, run_tool


def tool(function: dict[str, Any]) -> Tool:
    """A tool of the lab, its schema as the lab's model knows it."""

    async def invoke(**arguments: Any) -> str:
        return run_tool(function["name"], arguments)

    return Tool.from_schema(
        invoke,
        name=function["name"],
        description=function["description"],
        json_schema=function["parameters"],
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponsesModel])
async def test_a_tool_conversation(lab: Lab, model: Any, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="key") as client:
        agent = Agent(
            model("policy", provider=OpenAIProvider(openai_client=client)),
            instructions=SYSTEM_PROMPT,
            tools=[tool(function) for function in FUNCTIONS],
            model_settings={"temperature": 0},
        )
        history: list[Any] = []
        for text in USERS:
            if stream:
                async with agent.run_stream(text, message_history=history) as run:
                    output = await run.get_output()
            else:
                run = await agent.run(text, message_history=history)
                output = run.output
            history = run.all_messages()
    turns = await check_recorded(lab)
    assert output == turns[-1].response["content"]
