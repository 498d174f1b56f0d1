"""Tools of the Responses API as functions of chat completions, and back."""

from __future__ import annotations

from typing import Any

import pytest

from api_proxy.errors import ApiError
from api_proxy.reply.reply import Reply, SentCall
from api_proxy.responses_api.items import messages_of, reply_items
from api_proxy.responses_api.schemas import ResponsesRequest
from api_proxy.responses_api.tools import chat_tools, namespaces_of, response_tools

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{**LOOK, "name": "spawn"}, {**LOOK, "name": "close"}],
}


def test_a_namespace_is_shown_flat_and_comes_back() -> None:
    tools = [LOOK, AGENTS, {**LOOK, "name": "listen"}]
    functions = chat_tools(tools)
    names = [function["function"]["name"] for function in functions]
    assert names == ["look", "agents__spawn", "agents__close", "listen"]
    assert "strict" not in functions[0]["function"]
    namespaces = namespaces_of(tools)
    assert namespaces == {"agents": "Sub-agents."}
    assert response_tools(functions, namespaces) == tools


def test_calls_keep_namespace_and_name_apart() -> None:
    call = SentCall(id="call_1", name="agents__spawn", arguments="{}")
    message = Reply(content="", reasoning=None, tool_calls=(call,)).message()
    (item,) = reply_items("a" * 32, message, "completed", {"agents": ""})
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
    request = ResponsesRequest.model_validate({"model": "policy", "input": [item]})
    (back,) = messages_of(request.input)
    assert back["tool_calls"] == message["tool_calls"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "tools": []}], "tools[0]"),
        ([{"type": "namespace", "name": "a", "tools": {}}], "tools[0]"),
        ([{"type": "namespace", "name": "a", "tools": [1]}], "tools[0].tools[0]"),
        ([{**AGENTS, "tools": [{"type": "custom", "name": "x"}]}], "tools[0].tools[0].type"),
        ([{**AGENTS, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([AGENTS, {**LOOK, "name": "agents__spawn"}], "tools"),
        ([AGENTS, {**LOOK, "name": "agents__other"}], "tools"),
        ([AGENTS, AGENTS], "tools"),
        ([AGENTS, {**AGENTS, "name": "agents__x"}], "tools"),
    ],
)
def test_refusals(tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_tools(tools)
    assert caught.value.param == param
