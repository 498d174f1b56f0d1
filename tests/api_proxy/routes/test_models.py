"""The names under which the one model is served: in the lists and in every door's replies."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.api_proxy.conftest import Door

USER = {"role": "user", "content": "hi"}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}


@pytest.mark.parametrize("path", DOORS)
async def test_another_model_is_refused_with_the_names_that_exist(door: Door, path: str) -> None:
    response = await door.client.post(path, json={"model": "gpt-4", **DOORS[path]})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert "'gpt-4'" in message
    assert "Served: 'policy'" in message
    assert "proxy.model_aliases" in message
    assert "\n" not in message


@pytest.mark.parametrize("settings", [{"model_aliases": ["gpt-4", "claude"]}])
@pytest.mark.parametrize("path", DOORS)
async def test_an_alias_is_served_and_repeated(door: Door, path: str) -> None:
    door.will_say("Hello.", "Hello.", "Hello.")
    response = await door.client.post(path, json={"model": "gpt-4", **DOORS[path]})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "gpt-4"
    body = {"model": "gpt-4", "stream": True, **DOORS[path]}
    assert '"model":"gpt-4"' in (await door.client.post(path, json=body)).text
    response = await door.client.post(path, json={"model": "policy", **DOORS[path]})
    assert response.json()["model"] == "policy"
    response = await door.client.post(path, json={"model": "other", **DOORS[path]})
    assert "Served: 'policy', 'gpt-4', 'claude'" in response.json()["error"]["message"]


@pytest.mark.parametrize("settings", [{"model_aliases": ["gpt-4"]}])
async def test_a_stored_response_keeps_the_name_that_was_asked_for(door: Door) -> None:
    door.will_say("Hello.")
    response = await door.client.post("/v1/responses", json={"model": "gpt-4", "input": "hi"})
    again = await door.client.get(f"/v1/responses/{response.json()['id']}")
    assert again.json()["model"] == "gpt-4"


@pytest.mark.parametrize("settings", [{"model_aliases": ["gpt-4", "*"]}])
async def test_any_name_may_be_served(door: Door) -> None:
    door.will_say("Hello.")
    response = await door.post([USER], model="whatever/it-is")
    assert response.json()["model"] == "whatever/it-is"
    listed = (await door.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["policy", "gpt-4"]
    assert (await door.client.get("/v1/models/whatever/it-is")).json()["id"] == "whatever/it-is"
    # Each chunk of a stream repeats the name.
    refused = await door.post([USER], model="x" * 257)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("settings", [{"model_aliases": ["claude"]}])
async def test_the_list_in_the_words_of_anthropic(door: Door) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    body = (await door.client.get("/v1/models", headers=headers)).json()
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "policy", "claude")
    first = body["data"][0]
    assert (first["type"], first["id"], first["display_name"]) == ("model", "policy", "policy")
    assert first["created_at"] == "1970-01-12T13:46:40Z"
    assert first["max_input_tokens"] == 4096
    one = (await door.client.get("/v1/models/claude", headers=headers)).json()
    assert (one["type"], one["id"]) == ("model", "claude")


async def test_the_official_anthropic_client_lists_models(door: Door, served: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=served, api_key="key") as client:
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.type) for model in listed] == [("policy", "model")]
        assert (await client.models.retrieve("policy")).created_at.year == 1970
