"""LangGraph's ready agent with a checkpointer, through the door that the argument names."""

import sys

from conversation import RESULT, SYSTEM, URL, USERS, tell
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

DOOR = sys.argv[1]
if DOOR == "messages":
    model = ChatAnthropic(model="policy", base_url=URL, api_key="key")
else:
    responses = DOOR == "responses"
    model = ChatOpenAI(
        model="policy", base_url=f"{URL}/v1", api_key="key", use_responses_api=responses
    )


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return RESULT


agent = create_react_agent(model, [get_weather], prompt=SYSTEM, checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
for text in USERS:
    state = agent.invoke({"messages": [HumanMessage(text)]}, thread)
    tell(state["messages"][-1].text)
