"""A verifier, asked: functions in a process of their own, URLs, and every wrong answer."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from judge.verifier.calls import (
    InvalidOutcome,
    Said,
    VerifierFailure,
    VerifierUnavailable,
    verify,
    why_not_found,
)
from judge.verifier.config import VerifierConfig

MODULE = "tests.judge.verifier.judged_by"


def session(answer: str) -> dict[str, Any]:
    return {
        "session_id": "s1",
        "name": None,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}],
        "tools": [{}, {}],
    }


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as opened:
        yield opened


async def said(client: httpx.AsyncClient, function: str, answer: str, **settings: Any) -> Said:
    config = VerifierConfig(source=f"{MODULE}:{function}", **settings)
    return await verify(config, session(answer), client)


async def test_a_function_says_a_number_and_why(client: httpx.AsyncClient) -> None:
    assert await said(client, "words", "Yes, please.") == Said(1.0, "it is polite")
    assert await said(client, "words", "No.") == Said(0.25, "2 tools")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("0.5", Said(0.5, None)),
        ("True", Said(1.0, None)),
        ("(0, ' ')", Said(0.0, None)),
        ("__import__('numpy').float32(0.5)", Said(0.5, None)),
        ("(1, 'x' * 9000)", Said(1.0, "x" * 4000)),
        ("{'outcome': 1, 'reason': 'well done'}", Said(1.0, "well done")),
    ],
)
async def test_forms_of_an_answer(client: httpx.AsyncClient, answer: str, expected: Said) -> None:
    assert await said(client, "number", answer) == expected


@pytest.mark.parametrize(
    "answer", ["float('nan')", "float('inf')", "1.01", "-0.5", "10**400", "None", "'good'", "{}"]
)
async def test_no_outcome(client: httpx.AsyncClient, answer: str) -> None:
    with pytest.raises(InvalidOutcome, match="not a number from 0 to 1"):
        await said(client, "number", answer)


async def test_a_function_that_raises_or_ends(client: httpx.AsyncClient) -> None:
    with pytest.raises(VerifierUnavailable, match="KeyError: 's1'") as error:
        await said(client, "raises", "x")
    assert error.value.failure is VerifierFailure.FAILED
    with pytest.raises(VerifierUnavailable, match="ended with status 7"):
        await said(client, "ends", "x")


async def test_what_others_print_is_no_answer_and_nobody_waits_for_them(
    client: httpx.AsyncClient,
) -> None:
    begun = time.monotonic()
    assert await said(client, "starts_others", "x") == Said(0.5, None)
    assert time.monotonic() - begun < 15


async def test_a_function_that_hangs_is_killed(client: httpx.AsyncClient) -> None:
    begun = time.monotonic()
    with pytest.raises(VerifierUnavailable, match="no answer in 1 s") as error:
        await said(client, "hangs", "x", timeout_s=1.0)
    assert error.value.failure is VerifierFailure.TIMEOUT
    assert time.monotonic() - begun < 60


async def test_a_call_ends_with_whoever_waits_for_it() -> None:
    """A judge that is killed leaves no function behind that hangs."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "judge.verifier.child", f"{MODULE}:hangs"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(session("x")).encode() + b"\n")
    await child.stdin.drain()
    child.stdin.close()
    async with asyncio.timeout(60):
        assert await child.wait() == 1


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (httpx.Response(200, json={"outcome": 0.75, "reason": "so so"}), Said(0.75, "so so")),
        (httpx.Response(200, json={"outcome": 2}), InvalidOutcome),
        (httpx.Response(200, json=[1]), InvalidOutcome),
        (httpx.Response(200, text="fine"), InvalidOutcome),
        (httpx.Response(503), VerifierUnavailable),
    ],
)
async def test_a_url(reply: httpx.Response, expected: Said | type[Exception]) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return reply

    config = VerifierConfig(source="http://verifier.test/check")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        if isinstance(expected, Said):
            assert await verify(config, session("x"), client) == expected
        else:
            with pytest.raises(expected):
                await verify(config, session("x"), client)
    assert seen[0].url == config.source
    assert json.loads(seen[0].content) == session("x")


async def test_a_url_that_does_not_answer(client: httpx.AsyncClient) -> None:
    config = VerifierConfig(source="http://127.0.0.1:9/check", timeout_s=5.0)
    with pytest.raises(VerifierUnavailable, match="failed"):
        await verify(config, session("x"), client)


async def test_what_cannot_be_called_is_found_at_the_start() -> None:
    assert await why_not_found(f"{MODULE}:words") is None
    assert await why_not_found("https://verifier.test") is None
    assert "no attribute 'nothing'" in (await why_not_found(f"{MODULE}:nothing") or "")
    assert "is not a function" in (await why_not_found(f"{MODULE}:NOT_A_FUNCTION") or "")
    assert "No module named" in (await why_not_found("not_here:f") or "")


@pytest.mark.parametrize(
    "source",
    ["module", "a b:c", "ftp://x", "module:", ":f", "", "http://", "http:///x", "http://a b/c"],
)
def test_what_names_nothing_is_refused(source: str) -> None:
    with pytest.raises(ValidationError, match="write module:function, or a URL"):
        VerifierConfig(source=source)
