"""Who gets in: keys, where they are looked for, and what is said to those that have none."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from api_proxy.access.keyring import KeyRing
from api_proxy.config import ProxyConfig
from api_proxy.errors import ApiError
from records.errors import StoreUnavailable
from records.keys import Keys
from records.store import Store
from tests.api_proxy.conftest import Clock, Door

HI = [{"role": "user", "content": "hi"}]
MESSAGE = {"model": "policy", "max_tokens": 20, "messages": HI}
ALL_ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/policy"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("GET", "/v1/responses/resp_1/input_items"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/metrics"),
    ("GET", "/no/such/route"),
]


@pytest.fixture
def keys(store: Store, clock: Clock) -> Keys:
    return Keys(store, clock)


@pytest.fixture
async def key(keys: Keys, door: Door) -> str:
    """A client's key, known to the proxy."""
    _, text = await keys.create(actor="test")
    await known(door)
    return text


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
async def test_every_route_asks_for_a_key(door: Door, key: str, method: str, path: str) -> None:
    for headers in ({}, bearer("opd_000000000000_" + "a" * 43), bearer(key[:-1] + "!")):
        refused = await door.client.request(method, path, headers=headers, content=b"{")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert door.engine.prompts == []


async def test_anthropics_shape_on_its_routes(door: Door, key: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = await door.client.post(path, json=MESSAGE)
        assert refused.status_code == 401
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "authentication_error"


async def test_the_key_is_taken_from_either_header(door: Door, key: str) -> None:
    door.will_say("One.", "Two.", "Three.")
    for headers in (bearer(key), {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
        answered = await door.post(HI, headers)
        assert answered.status_code == 200, answered.text


async def test_official_clients_get_their_own_errors(served: str, key: str, door: Door) -> None:
    door.will_say("Hello.")
    async with openai.AsyncOpenAI(
        base_url=f"{served}/v1", api_key="wrong", max_retries=0
    ) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model="policy", messages=HI)
        assert refused.value.code == "invalid_api_key"
    async with anthropic.AsyncAnthropic(base_url=served, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="policy", max_tokens=20, messages=HI)
    async with anthropic.AsyncAnthropic(base_url=served, api_key=key, max_retries=0) as client:
        reply = await client.messages.create(model="policy", max_tokens=20, messages=HI)
        assert reply.content[0].text == "Hello."


async def test_health_and_readiness_need_no_key(door: Door, key: str) -> None:
    assert (await door.client.get("/healthz")).status_code == 200
    assert (await door.client.get("/readyz")).status_code == 200


async def test_metrics_need_an_admin_key(door: Door, key: str, keys: Keys) -> None:
    refused = await door.client.get("/metrics", headers=bearer(key))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_needed"
    _, admin = await keys.create(actor="test", is_admin=True)
    await known(door)
    told = await door.client.get("/metrics", headers=bearer(admin))
    assert told.status_code == 200
    assert 'opd_requests_total{status="401"}' not in told.text


async def known(door: Door) -> None:
    """Let the keys that the proxy knows grow old."""
    clock: Any = door.app.state.service.deps.clock
    clock.now += door.app.state.service.config.key_refresh_s


async def test_without_any_key_everybody_on_this_machine_is_let_in(door: Door) -> None:
    door.will_say("One.", "Two.")
    assert (await door.post(HI)).status_code == 200
    assert (await door.post(HI, bearer("anything"))).status_code == 200
    assert (await door.client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"host": "192.0.2.1"}, {"host": "x"}])
async def test_without_any_key_nobody_else_is_let_in(door: Door) -> None:
    assert (await door.post(HI)).status_code == 401
    assert (await door.client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False)],
)
def test_what_is_reached_from_this_machine_only(host: str, is_loopback: bool) -> None:
    assert ProxyConfig(host=host).is_loopback is is_loopback


async def test_a_revoked_key_ends_within_the_refresh_time(door: Door, key: str, keys: Keys) -> None:
    door.will_say("One.")
    assert (await door.post(HI, bearer(key))).status_code == 200
    [known_key] = await keys.all()
    await keys.revoke(known_key.key_id, actor="test")
    await known(door)
    assert (await door.post(HI, bearer(key))).status_code == 401
    # The last key is gone, and the door is not open for that.
    assert (await door.post(HI)).status_code == 401


async def test_a_rotated_key_works_on_with_its_new_secret(door: Door, key: str, keys: Keys) -> None:
    door.will_say("One.", "Two.")
    message, first = await door.say(HI, bearer(key))
    new = await keys.rotate((await keys.all())[0].key_id, actor="test")
    await known(door)
    assert (await door.post(HI, bearer(key))).status_code == 401
    _, second = await door.say([*HI, message, *HI], bearer(new))
    assert second.session_id == first.session_id


async def test_known_keys_work_while_the_store_does_not_answer(
    door: Door, key: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await door.client.get("/v1/models", headers=bearer(key))).status_code == 200

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "read", fail)
    await known(door)
    assert (await door.client.get("/v1/models", headers=bearer(key))).status_code == 200
    assert (await door.client.get("/v1/models", headers=bearer("other"))).status_code == 401
    clock: Any = door.app.state.service.deps.clock
    clock.now += door.app.state.service.config.key_grace_s
    refused = await door.client.get("/v1/models", headers=bearer(key))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "store_unavailable"
    assert int(refused.headers["retry-after"]) > 0


async def test_a_proxy_that_never_read_the_keys_lets_nobody_in(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "read", fail)
    ring = KeyRing(store, ProxyConfig(), clock)
    with pytest.raises(ApiError) as refused:
        await ring.caller({})
    assert refused.value.status == 503
