"""Keys of two tenants and an admin, and clients that are logged in with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import httpx
import pytest

from records.keys import Keys
from records.store import Store
from tests.api_proxy.conftest import Clock, Door

Login = Callable[[str], Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def keys(door: Door, store: Store, clock: Clock) -> dict[str, str]:
    """The key of each tenant."""
    made = {}
    for name in ("acme", "other", "admin"):
        _, made[name] = await Keys(store, clock).create(
            actor="test", tenant=name, is_admin=name == "admin"
        )
    clock.now += door.app.state.service.config.key_refresh_s
    return made


@pytest.fixture
async def login(door: Door, keys: dict[str, str]) -> AsyncIterator[Login]:
    """Makes a client that is logged in with a tenant's key."""
    async with AsyncExitStack() as stack:

        async def logged_in(tenant: str) -> httpx.AsyncClient:
            transport = httpx.ASGITransport(app=door.app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
            await stack.enter_async_context(client)
            reply = await client.post("/ui/login", data={"key": keys[tenant]})
            assert reply.status_code == 303, reply.text
            return client

        yield logged_in
