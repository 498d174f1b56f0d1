"""A judge that misbehaves on demand: a raw HTTP server whose every reply the test chooses.

Only faults come from here; votes of a real model are tested in test_judge_engine.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from judge.config import JudgeConfig
from records.store import Store
from rollout_bridge.config import ClaimLoopConfig
from tests.records.new_store import new_store


@dataclass
class Reply:
    """One HTTP reply, or none: `hang` never answers, `reset` disconnects, `drip` never ends,
    `events` are streamed as they come.
    """

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    delay_s: float = 0.0
    hang: bool = False
    reset: bool = False
    drip: bool = False
    events: AsyncIterator[str] | None = None

    @classmethod
    def answer(cls, text: str | None, **options: Any) -> Reply:
        body = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "judge",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": text},
                }
            ],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
        }
        return cls(body=json.dumps(body), **options)

    @classmethod
    def error(cls, status: int, message: str, **headers: str) -> Reply:
        body = json.dumps({"error": {"message": message, "type": "error", "code": None}})
        return cls(
            status=status, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )


class FaultJudge:
    """`behave(number of the request, its body)` chooses each reply; `requests` keeps what came."""

    def __init__(self) -> None:
        self.behave: Callable[[int, dict[str, Any]], Reply] = lambda _n, _body: Reply.error(500, "")
        self.requests: list[dict[str, Any]] = []
        self.routing_keys: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.base_url = ""

    def replies(self, *replies: Reply) -> None:
        """These replies in order; the last one for all further requests."""
        self.behave = lambda number, _body: replies[min(number, len(replies) - 1)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                int(line.split(":")[1])
                for line in head.split("\r\n")
                if line.lower().startswith("content-length:")
            )
            keys = [line[18:].strip() for line in head.split("\r\n") if _is_key(line)]
            self.routing_keys.append(keys[0] if keys else None)
            body = json.loads(await reader.readexactly(length))
            number = len(self.requests)
            self.requests.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self._reply(reader, writer, self.behave(number, body))
            finally:
                self.in_flight -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away: some tests want just that
        finally:
            writer.close()

    async def _reply(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply
    ) -> None:
        if reply.reset:
            writer.transport.abort()
            return
        if reply.hang:
            await reader.read()  # until the client gives up
            return
        if reply.events is not None:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n")
            async for event in reply.events:
                writer.write(event.encode())
                await writer.drain()
            return
        await asyncio.sleep(reply.delay_s)
        data = reply.body.encode()
        length = len(data) + 10**6 if reply.drip else len(data)
        head = [f"HTTP/1.1 {reply.status} X", f"content-type: {reply.content_type}"]
        head += [f"content-length: {length}", "connection: close"]
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        writer.write(("\r\n".join(head) + "\r\n\r\n").encode() + data)
        while reply.drip and not reader.at_eof():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)
        await writer.drain()


def _is_key(line: str) -> bool:
    return line.lower().startswith("x-smg-routing-key:")


@pytest.fixture
async def judge_server() -> AsyncIterator[FaultJudge]:
    fault_judge = FaultJudge()
    server = await asyncio.start_server(fault_judge.serve, "127.0.0.1", 0)
    fault_judge.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield fault_judge


@pytest.fixture
def reply() -> type[Reply]:
    return Reply


@pytest.fixture
def judge_config(judge_server: FaultJudge) -> Callable[..., JudgeConfig]:
    """A configuration with short waits; keywords override it, `loop_*` those of the loop."""

    def build(**options: Any) -> JudgeConfig:
        loop = {
            "pause_min_s": 0.02,
            "pause_max_s": 0.1,
            "claim_ttl_s": 5.0,
            "poll_max_s": 0.05,
            "stop_grace_s": 1.0,
        } | {key[5:]: options.pop(key) for key in list(options) if key.startswith("loop_")}
        values = {"timeout_s": 2.0, "retries": 1, "retry_wait_s": 0.01, "retry_wait_max_s": 0.5}
        return JudgeConfig(
            base_url=judge_server.base_url,
            model="judge",
            loop=ClaimLoopConfig(**loop),
            **(values | options),
        )

    return build


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """An open SQLite store without rows."""
    async with await Store.open(new_store(tmp_path / "records.db")) as opened:
        yield opened
