"""The scripted agent over the official client: streamed and not, with and without headers, against
a faulty endpoint.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from examples.tool_lab.agent import AgentConfig, run_session
from examples.tool_lab.domain import TOOLS, assistant_call

Reply = Callable[[list[dict[str, Any]]], dict[str, Any]]


class Endpoint:
    """A chat endpoint that answers with `reply` and keeps what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request):
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(httpx.Headers(dict(request.headers)))
            message = reply(body["messages"])
            if "status" in message:
                return JSONResponse({"error": {"message": "broken"}}, message["status"])
            if body.get("stream"):
                return StreamingResponse(chunks(message), media_type="text/event-stream")
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return envelope("chat.completion", choice)

    def client(self) -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(app=self.app)
        return openai.AsyncOpenAI(
            base_url="http://lab/v1",
            api_key="k",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        )


def envelope(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "object": kind, "created": 1, "model": "policy", "choices": [choice]}


async def chunks(message: dict[str, Any]) -> AsyncIterator[str]:
    """The message in pieces: content by letters, tool-call arguments in halves."""
    deltas: list[dict[str, Any]] = [{"content": letter} for letter in message["content"]]
    for index, call in enumerate(message.get("tool_calls") or ()):
        text = call["function"]["arguments"]
        named = {"name": call["function"]["name"], "arguments": text[:5]}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "function": named}]})
        rest = {"arguments": text[5:]}
        deltas.append({"tool_calls": [{"index": index, "function": rest}]})
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        yield f"data: {json.dumps(envelope('chat.completion.chunk', choice))}\n\n"
    yield "data: [DONE]\n\n"


def weather_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Calls the weather tool with the city it is told of, and answers in Fahrenheit whatever it is
    asked.
    """
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "In Fahrenheit: 60, rain."}
    words = "".join(c if c.isalpha() else " " for c in messages[1]["content"]).split()
    known = {"What", "How", "Weather", "Tell", "Check", "Is", "I", "Hi", "Hello", "Well", "Hey"}
    cities = [w for w in words if w.istitle() and len(w) > 3 and w not in known | {"Thanks"}]
    return assistant_call("get_weather", {"city": cities[0] if cities else "x"}, "call_1")


@pytest.mark.parametrize("stream_share", [0.0, 1.0])
async def test_tool_calls_are_run_and_sent_back(stream_share):
    endpoint = Endpoint(weather_model)
    config = AgentConfig(stream_share=stream_share, header_share=1.0, leave_probability=0.0)
    async with endpoint.client() as client:
        reports = [await run_session(client, seed, config) for seed in range(12)]
    assert all(report.ended == "over" for report in reports)
    assert any("corrected" in report.reactions for report in reports)
    tool_messages = [m for m in endpoint.bodies[1]["messages"] if m["role"] == "tool"]
    assert tool_messages[0]["tool_call_id"] == "call_1"
    assert endpoint.bodies[0]["tools"] == TOOLS
    assert endpoint.bodies[0]["stream"] if stream_share else "stream" not in endpoint.bodies[0]
    assert len({headers["x-session-id"] for headers in endpoint.headers}) == len(reports)


async def test_at_closing_time_the_reply_that_was_asked_for_is_the_last():
    closing = asyncio.Event()

    def answers(messages: list[dict[str, Any]]) -> dict[str, Any]:
        closing.set()
        return weather_model(messages)

    endpoint = Endpoint(answers)
    async with endpoint.client() as client:
        report = await run_session(client, 1, AgentConfig(), closing=closing)
    assert (report.ended, report.turns, len(endpoint.bodies)) == ("over", 1, 1)


async def test_headers_are_sent_in_some_sessions_only():
    endpoint = Endpoint(weather_model)
    async with endpoint.client() as client:
        for seed in range(10):
            await run_session(client, seed, AgentConfig())
    with_header = ["x-session-id" in headers for headers in endpoint.headers]
    assert any(with_header)
    assert not all(with_header)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "no idea"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Br'},
                }
            ],
        },
    ],
)
@pytest.mark.parametrize("stream_share", [0.0, 1.0])
async def test_nonsense_ends_the_session_without_an_exception(message, stream_share):
    endpoint = Endpoint(lambda messages: message)
    async with endpoint.client() as client:
        report = await run_session(client, 1, AgentConfig(stream_share=stream_share))
    assert report.ended == "over"
    assert report.turns <= 8


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_an_endpoint_that_refuses_is_reported(status):
    endpoint = Endpoint(lambda messages: {"status": status})
    async with endpoint.client() as client:
        report = await run_session(client, 1, AgentConfig())
    assert report.ended == "failed"
    assert report.error is not None
    assert "broken" in report.error
