"""`/v1/hints`: who sees which hints, what is told of them, and what deleting one says."""

from __future__ import annotations

from typing import Any

import pytest

from api_proxy.access.callers import tenant_scope
from records.keys import Keys
from records.store import Store
from tests.api_proxy.conftest import Clock, Door
from tests.records.hints.test_memory import objected


@pytest.fixture
async def keys(door: Door, store: Store, clock: Clock) -> dict[str, dict[str, str]]:
    """Headers of a tenant, of another, and of an admin."""
    made = {}
    for name in ("acme", "other", "admin"):
        _, text = await Keys(store, clock).create(
            actor="test", tenant=name, is_admin=name == "admin"
        )
        made[name] = {"authorization": f"Bearer {text}"}
    clock.now += door.app.state.service.config.key_refresh_s
    return made


async def listed(door: Door, headers: dict[str, str], **query: Any) -> dict[str, Any]:
    response = await door.client.get("/v1/hints", headers=headers, params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_tenant_sees_and_deletes_its_own_hints_alone(
    door: Door, store: Store, keys: dict[str, dict[str, str]]
) -> None:
    await objected(store, "use Celsius", scope=tenant_scope("acme"))
    await objected(store, "be brief", scope=tenant_scope("other"))
    [mine] = (await listed(door, keys["acme"]))["data"]
    [theirs] = (await listed(door, keys["other"]))["data"]
    assert (mine["text"], mine["status"], mine["confirmed"]) == ("use Celsius", "active", 1)
    assert (mine["gap"], mine["is_rule"], mine["scope"]) == (None, None, tenant_scope("acme"))
    assert len((await listed(door, keys["admin"]))["data"]) == 2
    path = f"/v1/hints/{theirs['id']}"
    for method in ("GET", "DELETE"):
        refused = await door.client.request(method, path, headers=keys["acme"])
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "hint_not_found"
    shown = (await door.client.get(path, headers=keys["other"])).json()
    assert [one["words"] for one in shown["sources"]] == ["I wanted Celsius."]
    gone = await door.client.delete(path, headers=keys["other"])
    assert gone.json() == {
        "id": theirs["id"],
        "object": "hint",
        "deleted": True,
        "versions": [],
    }
    after = (await door.client.get(path, headers=keys["other"])).json()
    assert (after["status"], after["text"]) == ("deleted", "")
    assert [one["words"] for one in after["sources"]] == [""]
    assert (await door.client.delete(path, headers=keys["other"])).status_code == 404


async def test_hints_come_page_by_page_and_by_status(
    door: Door, store: Store, keys: dict[str, dict[str, str]]
) -> None:
    for number in range(3):
        await objected(store, f"hint {number}", scope=tenant_scope("acme"))
    first = await listed(door, keys["acme"], limit=2)
    assert [one["text"] for one in first["data"]] == ["hint 2", "hint 1"]
    assert first["has_more"]
    rest = await listed(door, keys["acme"], limit=2, after=first["last_id"])
    assert [one["text"] for one in rest["data"]] == ["hint 0"]
    assert not rest["has_more"]
    assert (await listed(door, keys["acme"], status="resting"))["data"] == []


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "status=gone"])
async def test_what_cannot_be_asked_is_refused(
    door: Door, keys: dict[str, dict[str, str]], query: str
) -> None:
    response = await door.client.get(f"/v1/hints?{query}", headers=keys["acme"])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]
