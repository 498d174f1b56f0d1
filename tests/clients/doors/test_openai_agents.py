"""openai-agents over both of its models: Responses, by items or by the proxy's state, and chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    FunctionTool,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
)

from examples.tool_lab.domain import SYSTEM_PROMPT
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import FUNCTIONS, USERS, check_recorded, run_tool

SILENT = RunConfig(tracing_disabled=True)


def tool(function: dict[str, Any]) -> FunctionTool:
    """A tool of the lab, its schema as the lab's model knows it."""

    async def invoke(_context: Any, arguments: str) -> str:
        return run_tool(function["name"], json.loads(arguments))

    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )


def lab_agent(model: Model) -> Agent:
    return Agent(
        name="traveller",
        instructions=SYSTEM_PROMPT,
        model=model,
        model_settings=ModelSettings(temperature=0),
        tools=[tool(function) for function in FUNCTIONS],
    )


async def say(agent: Agent, given: Any, stream: bool, **options: Any) -> Any:
    """One run of the agent, which answers a message of the user."""
    if not stream:
        return await Runner.run(agent, given, run_config=SILENT, **options)
    running = Runner.run_streamed(agent, given, run_config=SILENT, **options)
    async for _ in running.stream_events():
        pass
    return running


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_a_tool_conversation(lab: Lab, model: Any, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="key") as client:
        agent = lab_agent(model(model="policy", openai_client=client))
        history: list[Any] = []
        for text in USERS:
            run = await say(agent, [*history, {"role": "user", "content": text}], stream)
            history = run.to_input_list()
    turns = await check_recorded(lab)
    assert run.final_output == turns[-1].response["content"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_conversation_by_previous_response(lab: Lab, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="key") as client:
        agent = lab_agent(OpenAIResponsesModel(model="policy", openai_client=client))
        previous: str | None = None
        for text in USERS:
            options = {"previous_response_id": previous, "auto_previous_response_id": True}
            run = await say(agent, text, stream, **options)
            previous = run.last_response_id
    await check_recorded(lab)
