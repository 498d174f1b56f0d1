"""smolagents' ToolCallingAgent, which tells its calls and their results again as text.

The lab's model was not taught to read that: after its first answer it mostly errs. So this is about
what is recorded, not about what is said.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from smolagents import OpenAIModel, Tool, ToolCallingAgent

from examples.tool_lab.domain import SYSTEM_PROMPT
from records.names import TurnState
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import FUNCTIONS, USERS, check_sampled, recorded, run_tool


def lab_tool(function: dict[str, Any]) -> Tool:
    """A tool of the lab in smolagents' terms."""
    schema = function["parameters"]

    class LabTool(Tool):
        skip_forward_signature_validation = True
        name = function["name"]
        description = function["description"]
        output_type = "string"
        inputs: ClassVar[dict[str, Any]] = {
            key: {
                "description": key,
                "nullable": key not in schema.get("required", ()),
                **schema["properties"][key],
            }
            for key in schema["properties"]
        }

        def forward(self, *positional: Any, **arguments: Any) -> str:
            return run_tool(function["name"], arguments)

    return LabTool()


async def test_a_tool_conversation(lab: Lab) -> None:
    model = OpenAIModel("policy", api_base=f"{lab.url}/v1", api_key="key", temperature=0)
    tools = [lab_tool(function) for function in FUNCTIONS]
    agent = ToolCallingAgent(tools, model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = SYSTEM_PROMPT
    with model.client:
        for text in USERS:
            await asyncio.to_thread(agent.run, text, reset=text == USERS[0])
    turns = await recorded(lab)
    check_sampled(lab, turns)
    assert len({turn.session_id for turn in turns}) == 1
    first, second = turns[0], turns[1]
    assert second.parent_turn_id == first.turn_id
    assert [call["function"]["name"] for call in first.response["tool_calls"]] == ["get_weather"]
    assert first.state is TurnState.JUDGING
    (observation,) = first.next_state
    assert observation == second.messages[-1]
    assert run_tool("get_weather", {"city": ""}) in observation["content"][0]["text"]
    assert USERS[1] in str(turns[-1].messages)
