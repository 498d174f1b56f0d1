"""/v1/chat/completions and /v1/models of the embedded engine, for the judge and for inspection.

The prompt is the tokenizer's own chat template (`prompts`). The reply's content is the text as
sampled: tool calls and reasoning are not parsed here; the endpoint for agents is the proxy.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.scheduling.request import EngineRequest
from rollout_bridge.embedded.server import schemas
from rollout_bridge.embedded.server.http import finished, json_reply, news, openai_error, read_body
from rollout_bridge.embedded.server.text import TextStream, final_text
from rollout_bridge.engine.types import BACKGROUND_PRIORITY

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "n",
)


class ChatBody(BaseModel):
    """Body of /v1/chat/completions; sampling fields are checked like those of /generate."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def new_tokens(self) -> int | None:
        """Most tokens to sample, under either name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def add_routes(app: FastAPI, engine: Engine) -> None:
    """Add the OpenAI-compatible routes."""
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": engine.config.model,
            "object": "model",
            "created": created,
            "owned_by": "embedded",
            "root": engine.config.model,
            "max_model_len": engine.context_length,
        }
        adapters = [
            {**model, "id": name, "root": path, "parent": engine.config.model}
            for name, path in engine.adapters.items()
        ]
        return json_reply({"object": "list", "data": [model, *adapters]})

    @app.post("/v1/chat/completions")
    async def chat_completions(http_request: Request) -> Response:
        try:
            body = ChatBody.model_validate(await read_body(http_request))
            requests = await _requests(body, engine)
            for request in requests:
                engine.submit(request)
        except ValidationError as error:
            return openai_error(schemas.explain(error))
        except BadRequest as error:
            return openai_error(str(error))
        reply = _Reply(body, engine)
        if body.stream:
            events = reply.events(requests[0])
            return StreamingResponse(events, media_type="text/event-stream")
        if not await finished(engine, http_request, requests):
            return Response(status_code=499)
        failure = next((request.error for request in requests if request.error), None)
        if failure is not None:
            return openai_error(failure, kind="InternalServerError", status=500)
        return json_reply(reply.whole(requests))


async def _requests(body: ChatBody, engine: Engine) -> list[EngineRequest]:
    """One engine request for each of `n` choices."""
    extra = body.model_extra or {}
    values = {name: extra[name] for name in _SAMPLING_FIELDS if extra.get(name) is not None}
    params = schemas.parse_sampling(
        {**values, "max_new_tokens": body.new_tokens, "sampling_seed": body.seed}
    )
    if body.stream and params.n > 1:
        raise BadRequest("streaming of n > 1 choices is not supported")
    ids = await engine.prompts.of_messages(
        body.messages,
        body.tools if body.tool_choice != "none" else None,
        body.chat_template_kwargs or {},
    )
    sampling = params.to_sampling(engine.stop_token_ids, max(engine.context_length - len(ids), 1))
    rid = uuid.uuid4().hex
    return [
        EngineRequest(
            input_ids=ids,
            sampling=sampling,
            rid=f"{rid}_{number}",
            num_top=body.top_logprobs if body.logprobs else 0,
            stream=body.stream,
            # Agents use /generate, through the proxy.
            priority=BACKGROUND_PRIORITY,
        )
        for number in range(params.n)
    ]


class _Reply:
    """Writes one completion in OpenAI's shape."""

    def __init__(self, body: ChatBody, engine: Engine):
        self._body = body
        self._engine = engine
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or engine.config.model,
        }

    def whole(self, requests: list[EngineRequest]) -> dict[str, Any]:
        """The completion at once."""
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": final_text(self._engine.tokenizer, request),
                },
                "logprobs": self._logprobs(request, 0),
                "finish_reason": _finish_reason(request),
            }
            for index, request in enumerate(requests)
        ]
        return {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": _usage(requests),
            "metadata": {"weight_version": self._engine.weight_version},
        }

    async def events(self, request: EngineRequest) -> AsyncIterator[bytes]:
        """The completion as server-sent events."""
        stream = TextStream(self._engine.tokenizer, request.sampling.skip_special_tokens)
        # What may begin a stop string must not be sent until it is known that it does not.
        held_back = max((len(stop) - 1 for stop in request.sampling.stop), default=0)
        sent, seen = 0, 0
        yield self._chunk({"role": "assistant", "content": ""})
        changes = news(self._engine, request)
        try:
            async for ended in changes:
                if request.error is not None:
                    yield _event({"error": {"message": request.error, "code": 500}})
                    break
                count = len(request.output_logprobs)
                if ended:
                    text = final_text(self._engine.tokenizer, request)
                else:
                    text = stream.push(request.output_ids[seen:count])
                    text = text[: max(sent, len(text) - held_back)]
                if len(text) > sent or (self._body.logprobs and count > seen):
                    logprobs = self._logprobs(request, seen, count)
                    yield self._chunk({"content": text[sent:]}, logprobs=logprobs)
                sent, seen = max(sent, len(text)), count
                if ended:
                    yield self._chunk({}, finish_reason=_finish_reason(request))
        finally:
            await changes.aclose()
        if (self._body.stream_options or {}).get("include_usage"):
            usage = {**self._common, "object": "chat.completion.chunk", "choices": []}
            yield _event({**usage, "usage": _usage([request])})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**self._common, "object": "chat.completion.chunk", "choices": [choice]})

    def _logprobs(
        self, request: EngineRequest, start: int, stop: int | None = None
    ) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        stop = len(request.output_logprobs) if stop is None else stop
        content = []
        for index in range(start, stop):
            top = request.output_top[index] if request.num_top else []
            entry = self._entry(request.output_logprobs[index], request.output_ids[index])
            entry["top_logprobs"] = [self._entry(*item) for item in top]
            content.append(entry)
        return {"content": content}

    def _entry(self, logprob: float, token_id: int) -> dict[str, Any]:
        token = self._engine.tokenizer.decode([token_id])
        return {"token": token, "bytes": list(token.encode()), "logprob": logprob}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _finish_reason(request: EngineRequest) -> str:
    assert request.finish is not None
    return request.finish.kind


def _usage(requests: list[EngineRequest]) -> dict[str, Any]:
    prompt = len(requests[0].input_ids)
    completion = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": requests[0].cached_tokens},
    }
