"""CrewAI: one agent and its tool, asked directly."""

from conversation import RESULT, SYSTEM, URL, USERS, tell
from crewai import LLM, Agent
from crewai.tools import tool


@tool("get_weather")
def get_weather(city: str) -> str:
    """Weather of a city."""
    return RESULT


agent = Agent(
    role="traveller's helper",
    goal=SYSTEM,
    backstory="You know the weather.",
    llm=LLM(model="openai/policy", base_url=f"{URL}/v1", api_key="key"),
    tools=[get_weather],
    verbose=False,
)
messages = []
for text in USERS:
    messages.append({"role": "user", "content": text})
    result = agent.kickoff(messages)
    messages.append({"role": "assistant", "content": result.raw})
    tell(result.raw)
