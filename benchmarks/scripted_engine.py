"""An engine without a model: it answers /generate with scripted tokens at a fixed pace.

    python -m benchmarks.scripted_engine --reply-ids 12,40,7,2 --first-ms 30 --pace-ms 20

A measuring instrument for what runs in front of an engine, because its own times are known. Token i
of a reply leaves at request + first + i * pace. It has the routes that a proxy needs (streamed or
not), samples nothing, and ignores sampling parameters. With the `texts` of its tokens it also
answers chat completions, for proxies that expect an OpenAI-compatible server. With `--port 0` the
operating system chooses the port; it is printed when the engine is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

VERSION = "0"
LOGPROB = -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Every reply: its ids (the last one is the stop token) and its pace in seconds. Events of a
    stream carry what is new, or, if not `incremental`, everything so far. `texts`: of the ids, for
    chat completions.
    """

    reply_ids: tuple[int, ...]
    first_s: float
    pace_s: float
    incremental: bool = True
    context_length: int = 1_000_000
    texts: tuple[str, ...] = ()


class ScriptedEngine:
    """The routes over one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_requests = 0

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.done)
        app.router.add_get("/health", self.done)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/v1/models", self.models)
        if self.script.texts:
            app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def done(self, request: web.Request) -> web.Response:
        """Nothing to do."""
        return web.json_response({})

    async def model_info(self, request: web.Request) -> web.Response:
        """The engine's model and version."""
        return web.json_response({"model_path": "scripted", "weight_version": VERSION})

    async def server_info(self, request: web.Request) -> web.Response:
        """The kind of engine that it replaces."""
        said = {"engine": "embedded", "incremental_streaming_output": self.script.incremental}
        return web.json_response(said)

    async def models(self, request: web.Request) -> web.Response:
        """The one model and its context length."""
        model = {"id": "scripted", "max_model_len": self.script.context_length}
        return web.json_response({"object": "list", "data": [model]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The script, as events or at once."""
        start = asyncio.get_running_loop().time()
        body = orjson.loads(await request.read())
        self.num_requests += 1
        num_prompt = len(body["input_ids"])
        budget = body.get("sampling_params", {}).get("max_new_tokens")
        total = min(len(self.script.reply_ids), budget or len(self.script.reply_ids))
        if not body.get("stream"):
            await self._wait_for(start, total - 1)
            return web.Response(
                body=orjson.dumps(self._event(num_prompt, 0, total, total)),
                content_type="application/json",
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        # A client that leaves is not an error: all do when a measurement ends.
        with contextlib.suppress(ConnectionResetError):
            for count in range(1, total + 1):
                await self._wait_for(start, count - 1)
                begin = count - 1 if self.script.incremental else 0
                event = orjson.dumps(self._event(num_prompt, begin, count, total))
                await response.write(b"data: " + event + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The script's texts as a chat completion, as chunks or at once."""
        start = asyncio.get_running_loop().time()
        body = orjson.loads(await request.read())
        self.num_requests += 1
        texts = self.script.texts
        if not body.get("stream"):
            await self._wait_for(start, len(texts) - 1)
            message = {"role": "assistant", "content": "".join(texts)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": len(texts)}
            usage["total_tokens"] = 1 + len(texts)
            reply = _chat("chat.completion", choice) | {"usage": usage}
            return web.Response(body=orjson.dumps(reply), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            for index, text in enumerate(texts):
                await self._wait_for(start, index)
                delta = {"role": "assistant", "content": text} if not index else {"content": text}
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                event = orjson.dumps(_chat("chat.completion.chunk", choice))
                await response.write(b"data: " + event + b"\n\n")
            choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
            event = orjson.dumps(_chat("chat.completion.chunk", choice))
            await response.write(b"data: " + event + b"\n\ndata: [DONE]\n\n")
        return response

    async def _wait_for(self, start: float, index: int) -> None:
        due = start + self.script.first_s + index * self.script.pace_s
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

    def _event(self, num_prompt: int, begin: int, count: int, total: int) -> dict[str, Any]:
        ids = self.script.reply_ids[begin:count]
        meta: dict[str, Any] = {
            "finish_reason": None,
            "prompt_tokens": num_prompt,
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": VERSION,
            "output_token_logprobs": [[LOGPROB, token, None] for token in ids],
        }
        if count == total:
            is_whole = total == len(self.script.reply_ids)
            ended = {"type": "stop", "matched": ids[-1]}
            meta["finish_reason"] = ended if is_whole else {"type": "length", "length": total}
            meta["weight_versions"] = [{"version": VERSION, "start": 0, "end": count}]
        return {"text": "", "output_ids": ids, "meta_info": meta}


def _chat(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-scripted",
        "object": kind,
        "created": 1,
        "model": "scripted",
        "choices": [choice],
    }


async def serve(script: Script, host: str, port: int) -> None:
    """Serve until cancelled; prints the port when ready."""
    runner = web.AppRunner(ScriptedEngine(script).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    print(f"scripted engine: port {runner.addresses[0][1]}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--reply-ids", required=True, help="comma-separated token ids")
    parser.add_argument("--first-ms", type=float, default=30.0)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cumulative", action="store_true", help="events carry all tokens so far")
    options = parser.parse_args()
    script = Script(
        reply_ids=tuple(int(token) for token in options.reply_ids.split(",")),
        first_s=options.first_ms / 1000,
        pace_s=options.pace_ms / 1000,
        incremental=not options.cumulative,
    )
    import uvloop

    uvloop.run(serve(script, options.host, options.port))


if __name__ == "__main__":
    main()
