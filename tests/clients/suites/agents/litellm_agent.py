"""A loop over LiteLLM's SDK, through the door that the argument names."""

import json
import sys

import litellm
from conversation import RESULT, SYSTEM, URL, USERS, tell

DOOR = sys.argv[1]
FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def chat(model: str, base_url: str) -> None:
    """Chat completions in LiteLLM's words, whatever goes over the wire."""
    messages = [{"role": "system", "content": SYSTEM}]
    for text in USERS:
        messages.append({"role": "user", "content": text})
        while True:
            reply = litellm.completion(
                model=model,
                api_base=base_url,
                api_key="key",
                messages=messages,
                tools=[{"type": "function", "function": FUNCTION}],
                max_tokens=256,
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        tell(message.content)


def responses() -> None:
    """Responses, by items."""
    items = []
    for text in USERS:
        items.append({"role": "user", "content": text})
        while True:
            reply = litellm.responses(
                model="openai/policy",
                api_base=f"{URL}/v1",
                api_key="key",
                instructions=SYSTEM,
                input=items,
                tools=[{"type": "function", **FUNCTION}],
            )
            output = [item.model_dump(exclude_none=True) for item in reply.output]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                json.loads(call["arguments"])
                items.append(
                    {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
                )
        tell(output[-1]["content"][0]["text"])


if DOOR == "responses":
    responses()
elif DOOR == "messages":
    # It puts sentences of its own where a message has no text beside its call.
    litellm.modify_params = True
    chat("anthropic/policy", URL)
else:
    chat("openai/policy", f"{URL}/v1")
