"""Asking a verifier about one session: the function in a process of its own, or the URL.

Independent of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from judge.verifier.config import VerifierConfig, is_url
from rollout_bridge.worker import ServiceUnavailable

_SAID = 500
"""Characters of an error that are reported."""
_MOST_REASON = 4000
"""Characters of a reason that are kept: the judge reads it."""
_MOST_ANSWER = 65_536
_PART = 65_536
_LOOK_S = 0.01
_DRAIN_S = 1.0
_CHECK_S = 120.0


class VerifierFailure(StrEnum):
    """Why a verifier gave no outcome. The set is closed."""

    FAILED = "failed"
    """It raised, ended, or answered with an error."""
    TIMEOUT = "timeout"
    INVALID = "invalid"
    """It answered, but not with a number from 0 to 1."""


class VerifierUnavailable(ServiceUnavailable):
    """No answer; the same session may be asked about again."""

    def __init__(self, failure: VerifierFailure, detail: str) -> None:
        super().__init__(f"verifier: {failure.value}: {detail}")
        self.failure = failure


class InvalidOutcome(ValueError):
    """An answer that is not an outcome; asking again would give the same answer."""


@dataclass(frozen=True, slots=True)
class Said:
    """A verifier's answer: `outcome` in [0, 1]."""

    outcome: float
    reason: str | None


async def verify(
    config: VerifierConfig, session: dict[str, Any], client: httpx.AsyncClient
) -> Said:
    """Ask about one session. Raises VerifierUnavailable, InvalidOutcome."""
    assert config.source is not None, "there is no verifier to ask"
    if is_url(config.source):
        answer = await _post(config, session, client)
    else:
        answer = await _call(config, session)
    return _read(answer)


def _read(answer: Any) -> Said:
    if not isinstance(answer, dict) or "outcome" not in answer:
        raise InvalidOutcome("the answer has no 'outcome'")
    value, reason = answer["outcome"], answer.get("reason")
    if not isinstance(value, int | float) or not 0 <= value <= 1:  # false for NaN, too
        raise InvalidOutcome("the outcome is not a number from 0 to 1")
    text = "" if reason is None else str(reason).strip()
    return Said(outcome=float(value), reason=text[:_MOST_REASON] or None)


async def _post(config: VerifierConfig, session: dict[str, Any], client: httpx.AsyncClient) -> Any:
    assert config.source is not None
    try:
        response = await client.post(
            config.source,
            # Agents' text may contain what UTF-8 cannot encode; escaped, it is still JSON.
            content=json.dumps(session),
            headers={"Content-Type": "application/json"},
            timeout=config.timeout_s,
        )
        response.raise_for_status()
    except httpx.TimeoutException:
        raise VerifierUnavailable(
            VerifierFailure.TIMEOUT, f"no answer in {config.timeout_s:g} s"
        ) from None
    except httpx.HTTPError as error:
        raise VerifierUnavailable(VerifierFailure.FAILED, str(error)[:_SAID]) from None
    try:
        return response.json()
    except ValueError:
        raise InvalidOutcome("the answer is not JSON") from None


async def _call(config: VerifierConfig, session: dict[str, Any]) -> Any:
    assert config.source is not None
    child = await asyncio.create_subprocess_exec(
        *_command(config.source),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    answer, said = bytearray(), bytearray()
    out = asyncio.create_task(_first(child.stdout, answer))
    err = asyncio.create_task(_last(child.stderr, said))
    try:
        async with asyncio.timeout(config.timeout_s):
            # stdin stays open: when it closes, the child ends.
            child.stdin.write(json.dumps(session).encode() + b"\n")
            with contextlib.suppress(ConnectionError):
                await child.stdin.drain()
            # Wait for the answer to end, not for the process: asyncio would also wait for every
            # pipe to close, and whatever the function has started may hold one.
            await asyncio.shield(out)
            while child.returncode is None:
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        detail = f"no answer in {config.timeout_s:g} s"
        raise VerifierUnavailable(VerifierFailure.TIMEOUT, detail) from None
    finally:
        await _end(child)
        # Other writers to its pipes ended with it; one that has left the group is not waited for.
        await asyncio.wait([out, err], timeout=_DRAIN_S)
        out.cancel()
        err.cancel()
        _close(child)
    if child.returncode:
        detail = _last_line(said) or f"it ended with status {child.returncode}"
        raise VerifierUnavailable(VerifierFailure.FAILED, detail)
    try:
        return json.loads(answer)
    except ValueError:
        raise InvalidOutcome("the answer is not JSON") from None


async def _first(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Keep the first bytes; the rest is read and discarded, or its writer would wait forever."""
    while part := await stream.read(_PART):
        kept += part[: _MOST_ANSWER - len(kept)]


async def _last(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Keep the last bytes."""
    while part := await stream.read(_PART):
        kept += part
        del kept[:-_PART]


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill it and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    while child.returncode is None:  # `wait` would wait for its pipes, too
        await asyncio.sleep(_LOOK_S)


def _close(child: asyncio.subprocess.Process) -> None:
    """Close its pipes. A process that holds their other ends would keep ours open."""
    child._transport.close()  # type: ignore[attr-defined] # asyncio has no public way


def _command(source: str) -> list[str]:
    return [sys.executable, "-m", "judge.verifier.child", source]


def _last_line(text: bytes | bytearray) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_SAID] if lines else ""


async def why_not_found(source: str) -> str | None:
    """Why a function cannot be called; None if it can, or if `source` is a URL."""
    if is_url(source):
        return None
    child = await asyncio.create_subprocess_exec(
        *_command(source), "--check", stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        _, err = await asyncio.wait_for(child.communicate(), _CHECK_S)
    except TimeoutError:
        return f"importing it took more than {_CHECK_S:g} s"
    finally:
        await _end(child)
        _close(child)
    return None if child.returncode == 0 else _last_line(err) or "it cannot be imported"
