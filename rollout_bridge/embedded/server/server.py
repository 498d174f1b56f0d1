"""The embedded engine over HTTP: SGLang's routes, error shapes and status codes.

`create_app` is for tests and embedding, `serve` for a process of its own. The judge's route is in
`chat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError

from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import BadRequest, WeightsRejected
from rollout_bridge.embedded.scheduling.request import EngineRequest
from rollout_bridge.embedded.server import adapter_routes, chat, schemas
from rollout_bridge.embedded.server.access import Access
from rollout_bridge.embedded.server.http import (
    event_stream,
    finished,
    json_reply,
    read_body,
    validation_reply,
)
from rollout_bridge.embedded.server.replies import ReplyWriter
from rollout_bridge.engine.keys import read_key_file

Body = TypeVar("Body", bound=BaseModel)


def create_app(engine: Engine, api_key: str | None = None) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread. Requests must send
    `api_key`; without one they must come from programs on this machine.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    _add_generate(app, engine)
    _add_control(app, engine)
    _add_information(app, engine)
    adapter_routes.add_routes(app, engine)
    chat.add_routes(app, engine)
    app.add_middleware(Access, api_key=api_key)
    return app


def serve(
    config: EmbeddedEngineConfig, ready_callback: Callable[[int], None] | None = None
) -> None:
    """Load the model and serve until SIGTERM or SIGINT; `ready_callback` gets the port.

    Exits the process with status 1 if the engine fails while serving. Raises ValueError for a key
    file that cannot be read.
    """
    api_key = None if config.api_key_file is None else read_key_file(config.api_key_file)
    engine = Engine(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        port = listener.getsockname()[1]
        settings = uvicorn.Config(
            create_app(engine, api_key),
            loop="uvloop",
            http="httptools",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
        )
        server = _Server(settings, engine, lambda: ready_callback and ready_callback(port))
        engine.on_failure = server.stop_soon
        server.run(sockets=[listener])
    if engine.failure is not None:
        sys.exit(1)


class _Server(uvicorn.Server):
    """uvicorn that reports when it listens, and ends running requests before it stops."""

    def __init__(self, config: uvicorn.Config, engine: Engine, started: Callable[[], object]):
        super().__init__(config)
        self._engine = engine
        self._report_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._report_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Clients get what was sampled, marked as aborted, instead of a broken connection.
        if self._engine.alive:
            await self._engine.abort(None)
        await super().shutdown(sockets)

    def stop_soon(self) -> None:
        self.should_exit = True


def _add_generate(app: FastAPI, engine: Engine) -> None:
    @app.post("/generate")
    async def generate(http_request: Request) -> Response:
        try:
            value = await read_body(http_request)
            bodies = _split_batch(value)
            parsed = [schemas.GenerateBody.model_validate(item) for item in bodies]
            jobs = [job for body in parsed for job in await _jobs(body, engine)]
            for request, _ in jobs:
                if request.sampling.grammar is not None:
                    request.matcher = await engine.grammars.matcher(*request.sampling.grammar)
        except ValidationError as error:
            return validation_reply(schemas.explain(error))
        except BadRequest as error:
            return _generate_error(str(error))
        single = not _is_batch(value) and len(jobs) == 1
        if parsed[0].stream and not single:
            return _generate_error("streaming of a batch is not supported")
        try:
            for request, _ in jobs:
                request.stream = parsed[0].stream
                engine.submit(request)
        except BadRequest as error:
            for request, _ in jobs:
                await engine.abort(request.rid)
            return _generate_error(str(error), stream=parsed[0].stream)
        if parsed[0].stream:
            return StreamingResponse(event_stream(engine, *jobs[0]), media_type="text/event-stream")
        if not await finished(engine, http_request, [request for request, _ in jobs]):
            return Response(status_code=499)
        failure = next((request.error for request, _ in jobs if request.error), None)
        if failure is not None:
            return json_reply({"error": {"message": failure}}, 500)
        replies = [writer.reply() for _, writer in jobs]
        return json_reply(replies[0] if single else replies)


def _add_control(app: FastAPI, engine: Engine) -> None:
    async def parse(http_request: Request, model: type[Body]) -> Body:
        return model.model_validate(await read_body(http_request))

    @app.post("/update_weights_from_disk")
    async def update_weights(http_request: Request) -> Response:
        body = await parse(http_request, schemas.UpdateWeightsBody)
        try:
            affected = await engine.update_weights(
                body.model_path, body.weight_version, keep_cache=not body.flush_cache
            )
        except WeightsRejected as error:
            failed = {"success": False, "message": str(error), "num_paused_requests": 0}
            return json_reply(failed, 400)
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        done = {"success": True, "message": message, "num_paused_requests": affected}
        return json_reply(done)

    @app.post("/pause_generation")
    async def pause(http_request: Request) -> Response:
        body = await parse(http_request, schemas.PauseBody)
        await engine.pause(body.mode)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def resume() -> Response:
        await engine.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    @app.post("/abort_request")
    async def abort(http_request: Request) -> Response:
        body = await parse(http_request, schemas.AbortBody)
        if body.abort_all or body.rid:
            await engine.abort(None if body.abort_all else body.rid)
        return Response()

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        await engine.flush()
        return Response("Cache flushed.\n")

    @app.exception_handler(ValidationError)
    async def invalid(_: Request, error: ValidationError) -> Response:
        return validation_reply(schemas.explain(error))

    @app.exception_handler(BadRequest)
    async def malformed(_: Request, error: BadRequest) -> Response:
        return validation_reply(str(error))


def _add_information(app: FastAPI, engine: Engine) -> None:
    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=200 if engine.alive else 503)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return json_reply(_information(engine))

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        settings = engine.config.model_dump(mode="json")
        return json_reply({**settings, **_information(engine), **engine.load})


def _information(engine: Engine) -> dict[str, Any]:
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.config.model,
        "tokenizer_path": engine.config.model,
        "is_generation": True,
        "weight_version": engine.weight_version,
        "vocab_size": engine.vocab_size,
        "context_length": engine.context_length,
        "engine": "embedded",
        "enable_lora": True,
        "incremental_streaming_output": True,
    }


def _is_batch(value: Any) -> bool:
    ids, text = value.get("input_ids"), value.get("text")
    return isinstance(text, list) or bool(
        isinstance(ids, list) and ids and isinstance(ids[0], list)
    )


def _split_batch(value: Any) -> list[dict[str, Any]]:
    """One body per sequence; lists of the batch's length are dealt out."""
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    if not _is_batch(value):
        return [value]
    source = "text" if isinstance(value.get("text"), list) else "input_ids"
    size = len(value[source])
    dealt = [source]
    for name in (
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "rid",
        "lora_path",
    ):
        if isinstance(value.get(name), list):
            if len(value[name]) != size:
                raise BadRequest(f"{name} has {len(value[name])} entries for a batch of {size}")
            dealt.append(name)
    return [{**value, **{name: value[name][index] for name in dealt}} for index in range(size)]


async def _jobs(
    body: schemas.GenerateBody, engine: Engine
) -> list[tuple[EngineRequest, ReplyWriter]]:
    """Engine requests of one body: more than one for n > 1."""
    ids = body.input_ids
    if ids is None and body.text is not None:
        ids = await engine.prompts.of_text(body.text)
    if ids is None:
        raise BadRequest("Either text or input_ids should be provided.")
    if not ids:
        raise BadRequest("input_ids cannot be empty.")
    adapter = engine.adapter(body.lora_path)
    start = body.logprob_start_len if body.logprob_start_len is not None else -1
    if body.return_logprob and start >= len(ids):
        raise BadRequest(
            f"logprob_start_len={start} is not below the number of input tokens {len(ids)}. Please "
            "use a smaller logprob_start_len."
        )
    params = schemas.parse_sampling(body.sampling_params or {})
    sampling = params.to_sampling(engine.stop_token_ids, max(engine.context_length - len(ids), 1))
    jobs = []
    for number in range(params.n):
        request = EngineRequest(
            input_ids=ids,
            sampling=sampling,
            # Scores only if they are wanted: -1 stands for none.
            score_from=start + 1 if body.return_logprob and start >= 0 else None,
            num_top=body.top_logprobs_num if body.return_logprob else 0,
            token_ids=tuple(body.token_ids_logprob or ()) if body.return_logprob else (),
            cache_namespace=body.extra_key or "",
            priority=body.priority,
            adapter=adapter,
        )
        if body.rid is not None:
            request.rid = body.rid if params.n == 1 else f"{body.rid}_{number}"
        jobs.append((request, ReplyWriter(request, body, engine.tokenizer, engine.weight_version)))
    return jobs


def _generate_error(message: str, *, stream: bool = False) -> Response:
    if message.startswith("unknown field"):
        return json_reply({"error": message}, 400)
    if not stream:
        return json_reply({"error": {"message": message}}, 400)
    error = {
        "message": message,
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }
    content = b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"
    return Response(content, media_type="text/event-stream")
