"""What cannot be served is refused in OpenAI's shape; what fails elsewhere costs no reply."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from records.errors import StoreUnavailable
from records.names import TurnState
from rollout_bridge.engine.errors import EngineRejected, EngineUnavailable
from rollout_bridge.stop_order import StopOrder, order_stop, why_stopped
from tests.api_proxy.conftest import WEATHER, Door
from tests.records.looking import list_turns

USER = {"role": "user", "content": "hi"}


def assert_error(response: Any, status: int, code: str | None, param: str | None) -> None:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize("raw", [b"{", b"", b"[]", b"null", b'"text"', b"\xff\xfe"])
async def test_bodies_that_are_no_object(door: Door, raw: bytes) -> None:
    response = await door.client.post(
        "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
    )
    assert_error(response, 400, "invalid_json", None)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 3}], None),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a"}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([None], "messages[0]"),
    ],
)
async def test_bad_messages(door: Door, messages: Any, param: str | None) -> None:
    response = await door.post(messages)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].startswith(param or "messages[")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"turn_type": "wizard"}, "turn_type"),
        ({"session_id": "a\x00b"}, "session_id"),
        ({"session_id": "x" * 300}, "session_id"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
async def test_bad_fields(door: Door, fields: dict, param: str) -> None:
    response = await door.post([USER], **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert door.engine.prompts == []


async def test_arguments_that_nest_too_deep_for_a_parser_are_text(door: Door) -> None:
    """As are all that do not parse: a policy may have written them so."""
    door.will_say("Hello.")
    assert (await door.post(_called_with("[" * 2_000))).status_code == 200
    too_long = await door.post(_called_with("[" * 100_000))
    assert_error(too_long, 400, "context_length_exceeded", "messages")


def _called_with(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "no"}
    return [USER, {"role": "assistant", "tool_calls": [call]}, result, USER]


async def test_bad_headers(door: Door) -> None:
    response = await door.post([USER], {"X-Turn-Type": "wizard"})
    assert_error(response, 400, None, "turn_type")


async def test_unknown_model(door: Door) -> None:
    response = await door.client.post(
        "/v1/chat/completions", json={"model": "gpt-x", "messages": [USER]}
    )
    assert_error(response, 404, "model_not_found", "model")


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/nothing"])
async def test_a_wrong_base_url_is_told_the_right_one(door: Door, path: str) -> None:
    response = await door.client.post(path, json={"model": "policy", "messages": [USER]})
    assert_error(response, 404, "unknown_url", None)
    assert "ends in /v1" in response.json()["error"]["message"]


async def test_unknown_route_and_method(door: Door) -> None:
    assert_error(await door.client.get("/v1/nothing"), 404, "unknown_url", None)
    response = await door.client.get("/v1/chat/completions")
    assert_error(response, 405, "method_not_allowed", None)


@pytest.mark.parametrize("settings", [{"context_length": 64}])
async def test_prompt_longer_than_the_context(door: Door) -> None:
    response = await door.post([{"role": "user", "content": "hello " * 100}])
    assert_error(response, 400, "context_length_exceeded", "messages")
    door.will_say("ok")
    await door.say([USER], max_tokens=1000)
    params = door.engine.params[0]
    assert params.max_new_tokens == 64 - len(door.engine.prompts[0])


async def test_engine_that_finds_the_prompt_too_long(door: Door) -> None:
    message = "The input (70 tokens) is longer than the model's context length (64 tokens)."
    door.will_say(EngineRejected(400, message))
    response = await door.post([USER])
    assert_error(response, 400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("settings", [{"max_body_bytes": 2048, "max_messages": 3}])
async def test_huge_requests(door: Door) -> None:
    response = await door.post([{"role": "user", "content": "x" * 4096}])
    assert_error(response, 413, "request_too_large", None)

    async def parts():
        for _ in range(10):
            yield b"x" * 512

    response = await door.client.post(
        "/v1/chat/completions", content=parts(), headers={"content-type": "application/json"}
    )
    assert_error(response, 413, "request_too_large", None)
    assert_error(await door.post([USER] * 4), 400, "array_above_max_length", "messages")


async def test_unparsable_arguments_in_the_history_are_rendered(door: Door) -> None:
    door.will_say("I see.")
    broken = {"name": "get_weather", "arguments": '{"city": '}
    history = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": broken}]},
        {"role": "tool", "tool_call_id": "c", "content": "error"},
    ]
    _, turn = await door.say(history)
    assert '{"city": ' in door.rendering.decode(turn.prompt_ids)


async def test_odd_but_valid_messages(door: Door) -> None:
    door.will_say("a", "b")
    await door.say([{"role": "user", "content": ""}])
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    await door.say([{"role": "developer", "content": parts}, {"role": "user", "content": None}])


async def test_errors_reach_the_official_client(door: Door, agent: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await agent.chat.completions.create(model="other", messages=[USER])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await agent.chat.completions.create(model="policy", messages=[USER], n=17)


async def test_models_health_readiness_metrics(door: Door) -> None:
    door.will_say("Hello.")
    await door.say([USER])
    models = (await door.client.get("/v1/models")).json()
    (model,) = models["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 4096)
    assert model["limits"]["max_choices"] == 16
    assert (await door.client.get("/v1/models/policy")).status_code == 200
    assert_error(await door.client.get("/v1/models/x"), 404, "model_not_found", "model")
    assert (await door.client.get("/healthz")).status_code == 200
    assert (await door.client.get("/readyz")).json()["status"] == "ok"
    assert 'opd_requests_total{status="200"} 1.0' in (await door.client.get("/metrics")).text


async def test_not_ready_without_engine_or_store(door: Door, monkeypatch) -> None:
    async def ill() -> None:
        raise EngineUnavailable("gone")

    async def locked() -> None:
        raise StoreUnavailable("database is locked")

    monkeypatch.setattr(door.engine, "model_info", ill)
    monkeypatch.setattr(door.store, "latest_version", locked)
    response = await door.client.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "status": "unavailable",
        "engine": False,
        "store": False,
        "warnings": [],
        "training_stopped": None,
    }


async def test_readiness_says_what_stopped_training_and_no_more(door: Door, tmp_path: Path) -> None:
    service = door.app.state.service
    order_stop(tmp_path, StopOrder(reason="the guard withdrew version 2: secret-canary (3)"))
    service.deps = replace(service.deps, why_stopped=partial(why_stopped, tmp_path))
    response = await door.client.get("/readyz")
    assert response.json()["training_stopped"] == "the guard withdrew version 2"


async def test_a_store_that_fails_costs_no_reply(door: Door, monkeypatch) -> None:
    async def locked(*args: Any, **kwargs: Any) -> None:
        raise StoreUnavailable("database is locked")

    names = ("record_turn", "set_next_state", "ensure_session", "turns_by_response_node", "take_in")
    for name in names:
        monkeypatch.setattr(door.store, name, locked)
    door.will_say("Hello.", "Fine.")
    first = await door.post([USER], session_id="a")
    assert first.json()["choices"][0]["message"]["content"] == "Hello."
    history = [USER, first.json()["choices"][0]["message"], USER]
    second = await door.post(history, stream=True)
    assert second.text.endswith("data: [DONE]\n\n")
    metrics = (await door.client.get("/metrics")).text
    assert 'opd_store_spilled_total{what="turn"} 2.0' in metrics
    assert "opd_store_failed_turns_total 0.0" in metrics


@pytest.mark.parametrize("settings", [{"record_timeout_s": 0.2}])
async def test_a_slow_store_delays_a_reply_only_so_long(door: Door, monkeypatch) -> None:
    record_turn = door.store.record_turn
    freed = asyncio.Event()

    async def slow(*args: Any, **kwargs: Any) -> None:
        await freed.wait()
        await record_turn(*args, **kwargs)

    monkeypatch.setattr(door.store, "record_turn", slow)
    door.will_say("Hello.")
    response = await door.post([USER])
    assert response.status_code == 200
    assert await list_turns(door.store) == []
    freed.set()
    await door.app.state.service.recorder.drain()
    (turn,) = await list_turns(door.store)
    assert turn.state is TurnState.AWAITING_NEXT_STATE


async def test_unmatched_histories_are_warned_of(door: Door, caplog) -> None:
    door.will_say(*["Hello."] * 40)
    for index in range(40):
        history = [USER, {"role": "assistant", "content": f"never said {index}"}, USER]
        await door.say(history)
    assert "link to no earlier turn" in caplog.text
    assert "never said" not in caplog.text


async def test_a_store_that_fails_in_an_unforeseen_way_fails_the_reply(
    door: Door, monkeypatch, caplog
) -> None:
    async def broken(*args: Any, **kwargs: Any) -> None:
        raise LookupError("with the user's text in it")

    for name in ("record_turn", "set_next_state"):
        monkeypatch.setattr(door.store, name, broken)
    door.will_say("Hello.")
    response = await door.post([USER])
    # What nothing keeps is not answered.
    assert (response.status_code, response.json()["error"]["code"]) == (503, "turn_not_kept")
    assert "LookupError" in caplog.text
    assert "the user's text" not in caplog.text
