"""While there are no keys, only this machine's own programs are answered, on every route."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api_proxy.access.gate import OPEN_PATHS, is_page
from records.keys import Keys
from records.store import Store
from tests.api_proxy.conftest import Clock, Door
from tests.routes import routes_of

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "policy", "max_tokens": 20, "messages": MESSAGES}


def guarded_routes(door: Door) -> list[tuple[str, str]]:
    found = [
        (method, path.replace("{response_id}", "resp_1").replace("{name:path}", "policy"))
        for method, path in sorted(routes_of(door.app))
        if path not in OPEN_PATHS and not path.startswith("/ui/static")
    ]
    assert len(found) >= 14
    return found


def message_of(path: str, refused: httpx.Response) -> str:
    """The message, in the error shape of the route's API."""
    if is_page(path):
        return refused.text
    body = refused.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status", "named"),
    [
        ({"host": "rebound.example:8000"}, 403, "Host"),
        ({"origin": "https://evil.example"}, 403, "Origin"),
        ({"origin": "null"}, 403, "Origin"),
        ({"sec-fetch-site": "cross-site"}, 403, "Sec-Fetch-Site"),
    ],
)
async def test_every_route_refuses_what_a_web_page_could_send(
    door: Door, headers: dict[str, str], status: int, named: str
) -> None:
    for method, path in [*guarded_routes(door), ("GET", "/no/such/route")]:
        body = BODY if method == "POST" else None
        refused = await door.client.request(method, path, headers=headers, json=body)
        assert refused.status_code == status, (method, path)
        assert named in message_of(path, refused)
    assert door.engine.prompts == []
    assert sum((await door.store.counts()).values()) == 0
    for path in OPEN_PATHS:
        assert (await door.client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None]
)
async def test_bodies_that_are_not_declared_as_json_are_refused(
    door: Door, kind: str | None
) -> None:
    for method, path in guarded_routes(door):
        if method != "POST" or is_page(path):  # forms carry a token: pages/test_access.py
            continue
        headers = {} if kind is None else {"content-type": kind}
        refused = await door.client.post(path, content=b'{"a": 1}', headers=headers)
        assert refused.status_code == 415, path
        assert "Content-Type: application/json" in message_of(path, refused)
    assert door.engine.prompts == []


async def test_refusals_are_counted(door: Door) -> None:
    await door.client.get("/v1/models", headers={"host": "rebound.example"})
    told = (await door.client.get("/metrics")).text
    assert 'opd_foreign_requests_total{check="host"} 1.0' in told
    assert 'opd_requests_total{status="403"} 1.0' in told


@pytest.mark.parametrize("url", ["http://localhost:8000", "http://[::1]:8000", "http://127.0.0.9"])
async def test_own_names_and_own_pages_are_served(door: Door, url: str) -> None:
    door.will_say("One.", "Two.")
    for headers in ({}, {"origin": url, "sec-fetch-site": "same-origin"}):
        answered = await door.client.post(f"{url}/v1/chat/completions", json=BODY, headers=headers)
        assert answered.status_code == 200, answered.text


async def test_with_keys_any_name_and_page_may_ask(door: Door, store: Store, clock: Clock) -> None:
    _, key = await Keys(store, clock).create(actor="test")
    clock.now += 10
    door.will_say("One.")
    foreign: dict[str, Any] = {
        "host": "agents.example",
        "origin": "https://ui.example",
        "content-type": "text/plain",
        "authorization": f"Bearer {key}",
    }
    answered = await door.client.post("/v1/chat/completions", json=BODY, headers=foreign)
    assert answered.status_code == 200, answered.text
