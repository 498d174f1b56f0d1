"""AutoGen's AssistantAgent."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from conversation import RESULT, SYSTEM, URL, USERS, tell


async def get_weather(city: str) -> str:
    """Weather of a city."""
    return RESULT


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model="policy",
        base_url=f"{URL}/v1",
        api_key="key",
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
    )
    agent = AssistantAgent(
        "traveller",
        client,
        tools=[get_weather],
        system_message=SYSTEM,
        reflect_on_tool_use=True,
    )
    for text in USERS:
        result = await agent.run(task=text)
        tell(result.messages[-1].content)
    await client.close()


asyncio.run(main())
