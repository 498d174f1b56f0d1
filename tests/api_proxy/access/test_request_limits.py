"""How large a request is, found out from its bytes; and what is said of one that is too large."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from api_proxy.access.body_budget import BodyBudget
from api_proxy.access.request_limits import RequestLimits
from api_proxy.config import ProxyConfig
from api_proxy.errors import ApiError
from api_proxy.request import json_scan
from api_proxy.request.json_scan import JsonSize, is_surely_within, json_size
from api_proxy.server.refusals import Refusals
from tests.api_proxy.conftest import Door

TEXTS = st.text('a"\\[]{},é\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
USER = {"role": "user", "content": "hi"}


def counted(value: Any) -> tuple[int, int]:
    """What is counted of a value: one for it and for each bracket and comma; and its depth."""
    if not isinstance(value, (dict, list)):
        return 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    number = 1 + max(len(value) - 1, 0) + sum(count for count, _ in inner)
    return number, 1 + max((depth for _, depth in inner), default=0)


@given(value=VALUES, block=st.integers(1, 9), escaped=st.booleans())
def test_brackets_and_commas_outside_of_strings_are_counted(
    value: Any, block: int, escaped: bool
) -> None:
    raw = json.dumps(value, ensure_ascii=escaped).encode()
    number, depth = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "_BLOCK", block)
        size = json_size(raw)
    assert (size.num_values, size.depth) == (1 + number, depth)
    for most in (size, JsonSize(num_values=number, depth=depth), JsonSize(num_values=9, depth=3)):
        if is_surely_within(raw, most):
            assert size.num_values <= most.num_values
            assert size.depth <= most.depth
    assert is_surely_within(raw, JsonSize(num_values=2 + 2 * len(raw), depth=len(raw)))


def test_a_body_far_longer_than_the_context_is_refused_by_its_length() -> None:
    limits = RequestLimits(config=ProxyConfig(), context_length=4096)
    limits.check_length(4096 * 16 * 6)
    with pytest.raises(ApiError) as caught:
        limits.check_length(4096 * 16 * 6 + 20_000)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    RequestLimits(config=ProxyConfig(), context_length=None).check_length(32 * 2**20)
    with pytest.raises(ApiError) as caught:
        RequestLimits(config=ProxyConfig(), context_length=None).check_length(33 * 2**20)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 70_000}]},
        {"messages": [{"role": "assistant", "content": "", "reasoning_content": "x" * 70_000}]},
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "description": "x" * 70_000}}],
        },
        {
            "messages": [USER],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"x" * 70_000: {}}}}
            ],
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c", "function": {"name": "f", "arguments": "x" * 70_000}}
                    ],
                },
            ]
        },
    ],
)
async def test_all_that_is_rendered_counts(door: Door, fields: dict[str, Any]) -> None:
    response = await door.client.post("/v1/chat/completions", json={"model": "policy", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in response.json()["error"]["message"]
    assert door.engine.prompts == []


def test_bodies_share_what_there_is() -> None:
    budget = BodyBudget(ProxyConfig(max_bytes_in_progress=1024))
    with budget.hold("a") as held, budget.hold("b") as other:
        held.add(512)
        with pytest.raises(ApiError) as caught:
            held.add(1)
        assert caught.value.status == 429
        other.add(500)
        with budget.hold("c") as third, pytest.raises(ApiError) as caught:
            third.add(13)
        assert caught.value.status == 503
    assert budget.num_bytes == 0


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(Counter("test_oversized", "In a test.", ["limit"], registry=None))
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            refusals.note("tools")
            refusals.note("parts")
    assert len(caplog.records) == 2
