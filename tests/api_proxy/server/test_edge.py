"""Ids of requests, spellings of paths and methods, compressed bodies, web pages."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_proxy.config import ProxyConfig
from api_proxy.server import request_ids
from api_proxy.server.edge import Edge
from records.keys import Keys
from rollout_bridge.engine.errors import EngineUnavailable
from tests.api_proxy.conftest import Door

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "policy", "messages": [USER]}
PAGE = {"origin": "https://chat.example.com"}
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-session-id",
}


async def a_key(door: Door) -> None:
    """From now on requests without a key are refused."""
    clock = door.app.state.service.deps.clock
    await Keys(door.store, clock).create(actor="test")
    clock.now += 10
    assert (await door.client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
async def test_every_response_has_an_id_of_its_own(door: Door, stream: bool) -> None:
    door.will_say("Hello.", "Hello.")
    responses = [
        await door.post([USER], stream=stream),
        await door.post([USER], stream=stream),
        await door.post([]),
        await door.client.get("/v1/nothing"),
        await door.client.get("/healthz"),
        await door.client.post("/v1/messages", json={}),
    ]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)
    assert all(one.startswith("req_") for one in ids)
    assert [response.headers["request-id"] for response in responses] == ids
    assert responses[-1].json()["request_id"] == ids[-1]


async def test_a_plain_id_of_the_client_is_kept_and_any_other_is_not(door: Door) -> None:
    for sent, is_kept in (("trace-1.a_B", True), ("x" * 129, False), ("two words", False)):
        response = await door.client.get("/healthz", headers={"x-request-id": sent})
        assert (response.headers["x-request-id"] == sent) is is_kept


async def test_an_unforeseen_fault_has_an_id_too(door: Door, monkeypatch) -> None:
    async def fail(*_: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr(door.app.state.service, "prepare", fail)
    response = await door.post([USER])
    assert response.status_code == 500
    assert response.headers["x-request-id"].startswith("req_")


async def test_what_is_logged_meanwhile_names_the_request(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(request_ids.mark)
    caplog.handler.setFormatter(logging.Formatter("%(request)s%(message)s"))
    door.will_say(door.line("Hello", fail_at=1), EngineUnavailable("gone"))
    response = await door.post([USER], stream=True, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert "[mine] lost the engine's answer" in caplog.text
    door.will_say(EngineUnavailable("gone"))
    response = await door.post([USER], headers={"x-request-id": "yours"})
    assert response.status_code == 503
    assert "yours answered with 503" in caplog.text


async def test_a_probe_that_finds_it_not_ready_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=503)(scope, receive, send)

    transport = httpx.ASGITransport(app=Edge(refuse))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        for path in ("/readyz", "/readyz/", "/v1/models"):
            assert (await client.get(path)).status_code == 503
    assert caplog.text.count("answered with 503") == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/policy", "/health", "/healthz"])
async def test_head_is_get_without_a_body(door: Door, served: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=served) as client:
        for one in (client, door.client):
            whole, head = await one.get(path), await one.head(path)
            assert (whole.status_code, head.status_code) == (200, 200)
            assert head.headers["content-length"] == str(len(whole.content))
            assert head.content == b""


async def test_head_of_a_route_that_only_takes_posts(door: Door) -> None:
    assert (await door.client.head("/v1/chat/completions")).status_code == 405


async def test_a_trailing_slash_is_served_and_not_redirected(door: Door) -> None:
    door.will_say("a", "b", "c")
    answers = [
        await door.client.post("/v1/chat/completions/", json=BODY),
        await door.client.post("/v1/responses/", json={"model": "policy", "input": "hi"}),
        await door.client.post("/v1/messages/", json={**BODY, "max_tokens": 9}),
        await door.client.get("/v1/models/"),
        await door.client.get("/healthz/"),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5
    refused = await door.client.post("/v1/messages/", json={})
    assert refused.json()["type"] == "error"


async def test_a_slash_opens_no_route_that_needs_a_key(door: Door) -> None:
    await a_key(door)
    assert (await door.client.get("/metrics/")).status_code == 401
    assert (await door.client.get("/healthz/")).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress)],
)
async def test_a_compressed_body_is_read(door: Door, encoding: str, pack: Any) -> None:
    door.will_say("Hello.")
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    response = await door.client.post(
        "/v1/chat/completions", content=pack(json.dumps(BODY).encode()), headers=headers
    )
    assert response.status_code == 200, response.text
    turn = await door.turn(response.headers["x-turn-id"])
    assert turn.messages == [USER]


@pytest.mark.parametrize("settings", [{"max_body_bytes": 4096}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
async def test_what_a_body_unpacks_to_is_bounded(door: Door, path: str) -> None:
    packed = gzip.compress(b" " * 3_000_000)
    assert len(packed) < 4096
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    response = await door.client.post(path, content=packed, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400),
        ("gzip", b"", 400),
        ("br", b"x", 415),
        ("gzip, gzip", b"x", 415),
    ],
)
async def test_damaged_and_unknown_encodings_are_named(
    door: Door, encoding: str, content: bytes, status: int
) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    response = await door.client.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == status
    assert encoding in response.json()["error"]["message"]


async def test_web_pages_are_kept_out_by_default(door: Door) -> None:
    response = await door.client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("settings", [{"allowed_origins": ["https://chat.example.com"]}])
async def test_an_allowed_page_asks_first_and_reads_replies_and_refusals(door: Door) -> None:
    door.will_say("Hello.")
    await a_key(door)
    asked = await door.client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "x-session-id" in asked.headers["access-control-allow-headers"]
    refused = await door.post([USER], PAGE)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    other = {**PREFLIGHT, "origin": "https://evil.example.com"}
    asked = await door.client.options("/v1/chat/completions", headers=other)
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example.com/chat", ""])
def test_an_origin_has_a_scheme_and_no_path(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        ProxyConfig(allowed_origins=[origin])
