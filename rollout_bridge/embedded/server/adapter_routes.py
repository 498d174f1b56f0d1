"""Routes that load and unload adapters, in SGLang's shapes."""

from __future__ import annotations

from collections.abc import Awaitable

from fastapi import FastAPI, Request, Response

from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import AdapterRejected
from rollout_bridge.embedded.server.http import json_reply, read_body
from rollout_bridge.embedded.server.schemas import LoadAdapterBody, UnloadAdapterBody


def add_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes."""

    async def reply(done: Awaitable[None]) -> Response:
        error = None
        try:
            await done
        except AdapterRejected as rejected:
            error = str(rejected)
        said = {"success": error is None, "error_message": error}
        return json_reply({**said, "loaded_adapters": engine.adapters}, 400 if error else 200)

    @app.post("/load_lora_adapter")
    async def load(http_request: Request) -> Response:
        body = LoadAdapterBody.model_validate(await read_body(http_request))
        return await reply(engine.load_adapter(body.lora_name, body.lora_path))

    @app.post("/unload_lora_adapter")
    async def unload(http_request: Request) -> Response:
        body = UnloadAdapterBody.model_validate(await read_body(http_request))
        return await reply(engine.unload_adapter(body.lora_name))
