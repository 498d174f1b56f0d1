"""`/v1/completions`: a text is continued, recorded, and never trained on."""

from __future__ import annotations

import json

import openai
import pytest

from records.names import DropReason, TurnType
from tests.api_proxy.conftest import Door

PROMPT = "Once upon a time,"


async def complete(door: Door, prompt: object = PROMPT, **fields):
    body = {"model": "policy", "prompt": prompt, **fields}
    return await door.client.post("/v1/completions", json=body)


async def test_text_and_its_record(door: Door) -> None:
    door.will_say(" there was\n <tool_call> <think>a king.  ")
    response = await complete(door, logprobs=2)
    body = response.json()
    (choice,) = body["choices"]
    assert (body["object"], choice["finish_reason"]) == ("text_completion", "stop")
    assert choice["text"] == " there was\n <tool_call> <think>a king.  "
    turn = await door.turn(body["id"].removeprefix("cmpl-"))
    assert turn.prompt_ids.tolist() == door.rendering.tokenizer.encode(PROMPT)
    assert (turn.turn_type, turn.drop_reason) == (TurnType.TEXT, DropReason.TEXT_COMPLETION)
    assert turn.messages == [{"role": "text", "content": PROMPT}]
    assert turn.response == {"role": "text", "content": choice["text"]}
    assert len(choice["logprobs"]["tokens"]) == len(turn.response_ids)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {2}
    assert door.engine.params[0].max_new_tokens == 16


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
async def test_ids_are_taken_as_they_are(door: Door, prompt: list) -> None:
    door.will_say("ok")
    assert (await complete(door, prompt)).status_code == 200
    assert door.engine.prompts == [[5, 6]]


async def test_official_client(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.will_say(" a king. END", " a queen.")
    stream = await agent.completions.create(
        model="policy", prompt=PROMPT, stream=True, n=2, stop=["END"], max_tokens=40
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert sorted(texts) == [" a king. ", " a queen."]


async def test_a_conversation_does_not_continue_a_text(door: Door) -> None:
    said = "a long answer, which would be told apart from all others"
    door.will_say(said, "Fine.")
    await complete(door)
    user = {"role": "user", "content": PROMPT}
    _, turn = await door.say([user, {"role": "assistant", "content": said}, user])
    assert turn.parent_turn_id is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 99}, "n"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_what_is_refused(door: Door, fields: dict, param: str) -> None:
    response = await complete(door, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert json.dumps(error).count("\\n") == 0
