"""Which requests a server without keys takes for this machine's own."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from rollout_bridge.local_requests import is_loopback_host, refusal_of

JSON = {"content_type": "application/json"}


def check_of(method: str, allowed: tuple[str, ...] = (), /, **headers: str) -> str | None:
    raw = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): v for name, v in headers.items()}
    refusal = refusal_of(method, Headers(raw), allowed)
    return None if refusal is None else refusal.check


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "agents.localhost:1",
        "127.0.0.1",
        "127.8.9.1:8000",
        "[::1]:8000",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert is_loopback_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *[
            "",
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
        ],
        *["evillocalhost", "0.0.0.0:8000", "192.168.0.1", "[::]", "[fe80::1]", "::1", "127.1"],
        *["2130706433", "0x7f000001", "localhost@evil.example", "evil.example@localhost"],
        *["localhost/x", "localhost:x", "localhost:99999", " localhost", "localhost,evil.example"],
        *["127.0.0.1#", "[::1", "127.0.0.1?x"],
    ],
)
def test_names_that_somebody_else_may_give(host: str) -> None:
    assert not is_loopback_host(host)


def test_a_request_needs_one_host() -> None:
    none, two = Headers({}), Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    for headers in (none, two):
        refusal = refusal_of("GET", headers)
        assert refusal is not None
        assert refusal.check == "host"


@pytest.mark.parametrize(
    "origin",
    [
        *["https://evil.example", "null", "", "http://127.0.0.1:8001", "http://localhost:8000"],
        *["http://127.0.0.1:8000.evil.example", "http://127.0.0.1:8000/", "file://"],
    ],
)
def test_pages_of_another_origin(origin: str) -> None:
    assert check_of("GET", origin=origin) == "origin"
    assert check_of("POST", **JSON, origin=origin) == "origin"


def test_the_endpoints_own_pages_may_ask() -> None:
    assert check_of("POST", **JSON, origin="http://127.0.0.1:8000") is None
    assert check_of("GET", sec_fetch_site="same-origin") is None
    assert check_of("GET", sec_fetch_site="none") is None


def test_what_a_foreign_page_embeds_has_no_origin_and_is_refused() -> None:
    for site in ("cross-site", "same-site", "anything"):
        assert check_of("GET", sec_fetch_site=site) == "origin"


def test_origins_that_the_operator_allows() -> None:
    allowed = ("https://ui.example",)
    asked = {"origin": "https://ui.example", "sec_fetch_site": "cross-site"}
    assert check_of("POST", allowed, **JSON, **asked) is None
    assert check_of("POST", allowed, **JSON, origin="https://ui.example:8443") == "origin"
    assert check_of("POST", allowed, host="evil.example", **JSON, **asked) == "host"


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"]
)
def test_bodies_declared_as_json(kind: str) -> None:
    assert check_of("POST", content_type=kind, content_length="9") is None


@pytest.mark.parametrize(
    "kind",
    [
        *["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
        *["text/plain; application/json", "", "json", "text/json+json", "application/jsonx"],
    ],
)
def test_bodies_that_a_form_could_send(kind: str) -> None:
    assert check_of("POST", content_type=kind, content_length="9") == "content_type"
    # A form without fields has no body, and a kind all the same.
    assert check_of("POST", content_type=kind, content_length="0") == "content_type"


def test_a_body_without_a_kind_is_refused_and_no_body_needs_none() -> None:
    assert check_of("POST", content_length="9") == "content_type"
    assert check_of("PUT", transfer_encoding="chunked") == "content_type"
    assert check_of("POST", content_length="0") is None
    assert check_of("POST") is None
    assert check_of("GET") is None
