"""Every field of a request is served, refused by name, or named as one without effect."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from api_proxy.request.fields import METADATA, REFUSED
from records.names import DropReason
from rollout_bridge.scoring.hinting import hinted_prompt_ids
from tests.api_proxy.conftest import WEATHER, Door

USER = {"role": "user", "content": "hi"}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/completions": {"prompt": "hi"},
}
CONVERSATIONS = [path for path in DOORS if path != "/v1/completions"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
REFUSED_VALUES: dict[str, Any] = {
    "ignore_eos": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "custom_logit_processor": "x",
    "logits_processors": ["x"],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "guided_grammar": "root ::= 'a'",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "stop_token_ids": [1],
    "stop_regex": "x",
    "use_beam_search": True,
    "length_penalty": 1.5,
    "functions": [{"name": "f"}],
    "chat_template": "x",
    "documents": [{"text": "x"}],
    "skip_special_tokens": False,
    "separate_reasoning": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
    "return_hidden_states": True,
    "lora_path": "x",
    "best_of": 2,
    "typical_p": 0.5,
    "repeat_penalty": 1.2,
    "input_ids": [1],
}
NEUTRAL = {
    "ignore_eos": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "modalities": ["text"],
    "bad_words": [],
    "stop_token_ids": [],
    "length_penalty": 1.0,
    "best_of": 1,
    "skip_special_tokens": True,
    "audio": None,
    "functions": [],
}


async def post(door: Door, path: str, **fields: Any) -> httpx.Response:
    return await door.client.post(path, json={"model": "policy", **DOORS[path], **fields})


@pytest.mark.parametrize("path", DOORS)
async def test_what_would_change_the_answer_is_refused_by_name(door: Door, path: str) -> None:
    for name, value in REFUSED_VALUES.items():
        response = await post(door, path, **{name: value})
        assert response.status_code == 400, name
        message = response.json()["error"]["message"]
        assert f"'{name}' is not supported" in message
        assert "\n" not in message
    assert door.engine.prompts == []


@pytest.mark.parametrize("path", DOORS)
async def test_values_that_change_nothing_and_metadata_are_taken(door: Door, path: str) -> None:
    door.will_say("Hello.")
    named = {"metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "store": True}
    named |= {"prompt_cache_key": "k", "request_id": "r", "priority": 1}
    response = await post(door, path, **NEUTRAL, **named)
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DOORS)
async def test_what_has_no_effect_is_named_in_the_response(
    door: Door, path: str, stream: bool
) -> None:
    door.will_say("Hello.")
    fields = {"reasoning_effort": "low", "brand_new_field": 1, "\nodd name": 1, "verbosity": None}
    response = await post(door, path, stream=stream, **fields)
    assert response.status_code == 200, response.text
    names = response.headers["x-ignored-fields"].split(", ")
    assert names == ["reasoning_effort", "brand_new_field", "1 more"]


async def test_dials_inside_of_other_fields_are_named_too(door: Door) -> None:
    door.will_say("Hello.", "Hello.")
    response = await post(door, "/v1/responses", text={"verbosity": "low"}, reasoning={})
    assert response.headers["x-ignored-fields"] == "reasoning, text.verbosity"
    response = await post(door, "/v1/messages", output_config={"effort": "low"}, thinking={})
    assert response.headers["x-ignored-fields"] == "thinking, output_config.effort"


def test_the_two_lists_have_no_field_in_common() -> None:
    assert not METADATA & set(REFUSED)


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"regex": "[a-z]+"}, {"type": "regex", "pattern": "[a-z]+"}),
    ({"guided_regex": "a/b"}, {"type": "regex", "pattern": "a/b"}),
    ({"guided_json": SCHEMA}, {"type": "json_schema", "json_schema": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"type": "json_schema", "json_schema": SCHEMA}),
    ({"guided_choice": ["yes"]}, {"type": "const_string", "value": "yes"}),
    (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": "yes"},
                {"type": "const_string", "value": "no"},
            ],
        },
    ),
    ({"structured_outputs": {"regex": "a"}}, {"type": "regex", "pattern": "a"}),
    (
        {"structured_outputs": {"json": SCHEMA}},
        {"type": "json_schema", "json_schema": SCHEMA},
    ),
    (
        {"structured_outputs": {"json_object": True}},
        {"type": "json_schema", "json_schema": {"type": "object"}},
    ),
]


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_the_forms_of_an_answer_reach_the_engine_and_mark_the_turn(
    door: Door, path: str
) -> None:
    for fields, element in FORMS:
        door.will_say("yes")
        response = await post(door, path, **fields)
        assert response.status_code == 200, response.text
        grammar = door.engine.params[-1].grammar
        assert grammar is not None
        assert json.loads(grammar.text)["format"]["elements"][-1] == element
        turn = await door.turn(response.headers["x-turn-id"])
        assert turn.distribution_modified == "grammar"
        assert turn.drop_reason is DropReason.DISTRIBUTION_MODIFIED


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_an_answer_has_one_form(door: Door, path: str) -> None:
    response = await post(door, path, regex="a", guided_choice=["b"])
    assert response.status_code == 400
    assert "send one of 'regex' and 'guided_choice'" in response.json()["error"]["message"]
    response = await post(door, path, guided_json="not json")
    assert "'guided_json' must be a JSON schema" in response.json()["error"]["message"]
    response = await post(door, path, structured_outputs={"grammar": "x"})
    assert "'structured_outputs.grammar' is not supported" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["regex", "response_format", "chat_template_kwargs", "tools"])
async def test_a_text_that_is_continued_has_no_form(door: Door, name: str) -> None:
    response = await post(door, "/v1/completions", **{name: {"a": 1}})
    assert response.status_code == 400
    assert f"'{name}' is not supported" in response.json()["error"]["message"]


SAMPLED: list[tuple[str, Any, str]] = [
    ("repetition_penalty", 1.2, "penalty"),
    ("min_tokens", 3, "min_tokens"),
    ("min_p", 0.1, "min_p"),
    ("top_k", 5, "top_k"),
    ("frequency_penalty", 0.5, "penalty"),
    ("logit_bias", {"5": 1}, "logit_bias"),
]


@pytest.mark.parametrize("path", DOORS)
async def test_sampling_fields_are_served_by_every_door(door: Door, path: str) -> None:
    for name, value, mark in SAMPLED:
        door.will_say("Hello.")
        response = await post(door, path, **{name: value})
        assert response.status_code == 200, response.text
        params = door.engine.params[-1]
        assert params.distribution_modified() == mark
        asked = {"min_tokens": "min_new_tokens"}.get(name, name)
        given = {"5": 1.0} if name == "logit_bias" else value
        assert params.to_wire()[asked] == given
        turn = await door.turn(response.headers["x-turn-id"])
        assert turn.distribution_modified == mark


def prompt_tail(door: Door, number: int) -> str:
    return door.rendering.decode(door.engine.prompts[number])[-60:]


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_thinking_can_be_switched_off_for_a_request(door: Door, path: str) -> None:
    door.will_say("Hello.", "Hello.")
    await post(door, path)
    response = await post(door, path, chat_template_kwargs={"enable_thinking": False})
    assert response.status_code == 200, response.text
    assert not prompt_tail(door, 0).endswith("</think>\n\n")
    assert prompt_tail(door, 1).endswith("<think>\n\n</think>\n\n")
    turn = await door.turn(response.headers["x-turn-id"])
    assert turn.sampling["enable_thinking"] is False
    assert turn.drop_reason is None
    # Who hints renders the same prompt: everything but the user's message stays as it is.
    rendering = door.rendering.with_thinking(turn.sampling["enable_thinking"])
    hinted = hinted_prompt_ids(rendering, turn.messages, [], turn.prompt_ids, "Be kind.", 4096)
    text = door.rendering.decode(hinted)
    assert text.endswith("<think>\n\n</think>\n\n")
    assert "Be kind." in text


async def test_a_prompt_does_not_extend_one_of_another_template_setting(door: Door) -> None:
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    door.will_say("Hello.", "Fine.", "Good.")
    message, first = await door.say([USER], **off)
    history = [USER, message, USER]
    message, second = await door.say(history, **off)
    sampled = np.concatenate([first.prompt_ids, first.response_ids])
    assert second.prompt_ids[: len(sampled)].tolist() == sampled.tolist()
    history += [message, USER]
    _, third = await door.say(history)
    assert third.parent_turn_id == second.turn_id
    assert third.prompt_ids.tolist() == door.rendering.prompt_ids(history).tolist()


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_other_switches_of_templates_are_refused_by_name(door: Door, path: str) -> None:
    response = await post(door, path, chat_template_kwargs={"thinking_budget": 5})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "'chat_template_kwargs.thinking_budget' is not supported" in message


async def test_a_form_beside_tools_leaves_calls_open(door: Door) -> None:
    door.will_say("yes")
    await door.say([USER], tools=[WEATHER], guided_choice=["yes"])
    grammar = door.engine.params[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["format"]["elements"][-1]["type"] == "or"
