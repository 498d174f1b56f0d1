"""Who gets to see pages: a login with a key once there is one, and no form of another site."""

from __future__ import annotations

import re

import pytest

from api_proxy.access.logins import COOKIE, LOGIN_S
from records.keys import Keys, parsed
from records.store import Store
from tests.api_proxy.conftest import Clock, Door
from tests.api_proxy.pages.conftest import Login
from tests.records.hints.test_memory import objected

PAGES = ("/ui", "/ui/memory", "/ui/memory/x", "/ui/no-such-page")


def csrf_in(page: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found is not None, page
    return found[1]


@pytest.mark.parametrize("path", PAGES)
async def test_once_a_key_exists_pages_ask_for_it(
    door: Door, keys: dict[str, str], path: str
) -> None:
    for cookie in ("", f"{COOKIE}=made-up"):
        refused = await door.client.get(path, headers={"cookie": cookie})
        assert (refused.status_code, refused.headers["location"]) == (303, "/ui/login")
    form = await door.client.get("/ui/login")
    assert form.status_code == 200
    assert 'type="password"' in form.text
    assert (await door.client.get("/v1/runs/current/memory")).status_code == 401


async def test_a_login_is_a_cookie_that_is_not_the_key(door: Door, keys: dict[str, str]) -> None:
    wrong = await door.client.post("/ui/login", data={"key": keys["acme"][:-1] + "?"})
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    reply = await door.client.post("/ui/login", data={"key": keys["acme"]})
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    named = parsed(keys["acme"])
    assert named is not None
    assert named[1] not in cookie
    assert "secure" not in cookie.lower()
    by_tls = await door.client.post("https://127.0.0.1/ui/login", data={"key": keys["acme"]})
    assert "Secure" in by_tls.headers["set-cookie"]


async def test_a_cookie_opens_pages_and_their_json_and_nothing_else(login: Login) -> None:
    client = await login("acme")
    for path in ("/ui/memory", "/v1/runs/current/memory"):
        assert (await client.get(path)).status_code == 200
    for method, path in (("GET", "/v1/hints"), ("POST", "/v1/chat/completions")):
        assert (await client.request(method, path)).status_code == 401


async def test_a_login_ends_with_logout_time_and_key(
    door: Door, store: Store, keys: dict[str, str], login: Login, clock: Clock
) -> None:
    first, second, third = [await login(name) for name in ("acme", "acme", "other")]
    cookie = {"cookie": f"{COOKIE}={first.cookies[COOKIE]}"}
    page = await first.get("/ui/memory")
    unasked = await first.post("/ui/logout", data={"csrf": "no"})
    assert unasked.status_code == 403
    await first.post("/ui/logout", data={"csrf": csrf_in(page.text)})
    assert (await door.client.get("/ui/memory", headers=cookie)).status_code == 303
    assert (await second.get("/ui/memory")).status_code == 200
    named = parsed(keys["acme"])
    assert named is not None
    await Keys(store, clock).revoke(named[0], actor="test")
    clock.now += door.app.state.service.config.key_refresh_s
    assert (await second.get("/ui/memory")).status_code == 303
    assert (await third.get("/ui/memory")).status_code == 200
    clock.now += LOGIN_S
    assert (await third.get("/ui/memory")).status_code == 303


async def test_other_sites_send_no_forms(door: Door, keys: dict[str, str]) -> None:
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://bad.example"}):
        refused = await door.client.post("/ui/login", data={"key": keys["acme"]}, headers=headers)
        assert refused.status_code == 403
        assert "set-cookie" not in refused.headers
    long = await door.client.post("/ui/login", data={"key": "x" * 10_000})
    assert long.status_code == 413


async def test_without_keys_pages_are_open_here_and_closed_to_other_sites(
    door: Door, store: Store
) -> None:
    await objected(store, "use Celsius", scope="anonymous")
    page = await door.client.get("/ui/memory")
    assert "use Celsius" in page.text
    hint_id = (await door.client.get("/v1/runs/current/memory")).json()["data"][0]["id"]
    assert (await door.client.get("/ui/login")).headers["location"] == "/ui"
    foreign = await door.client.get("/ui/memory", headers={"host": "bad.example"})
    assert foreign.status_code == 403
    path = f"/ui/memory/{hint_id}"
    assert (await door.client.post(f"{path}/delete", data={"csrf": "no"})).status_code == 403
    token = csrf_in((await door.client.get(path)).text)
    gone = await door.client.post(f"{path}/delete", data={"csrf": token})
    assert gone.status_code == 303
    assert "use Celsius" not in (await door.client.get("/ui/memory")).text


async def test_pages_allow_no_script_but_their_own(door: Door) -> None:
    page = await door.client.get("/ui/memory")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert " style=" not in page.text
    assert "<style" not in page.text
    assert re.findall(r"<script[^>]*>", page.text) == ['<script src="/ui/static/pages.js" defer>']
    for name in ("pages.css", "pages.js", "icon.svg"):
        assert (await door.client.get(f"/ui/static/{name}")).status_code == 200
    assert (await door.client.get("/ui/static/..%2fmemory.py")).status_code == 404
