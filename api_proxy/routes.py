"""The routes: chat completions, models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from api_proxy.admission import admitted
from api_proxy.callers import admin_only
from api_proxy.choices import answer_all
from api_proxy.errors import model_not_found
from api_proxy.formats import ChatFormat
from api_proxy.schemas import MAX_CHOICES, MAX_STOPS, Completion, parse_completion
from api_proxy.turns import TurnService
from records.errors import StoreError
from rollout_bridge.engine.errors import EngineError

router = APIRouter()

_PROBE_TIMEOUT_S = 3.0


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions; the answered turn is recorded."""
    service: TurnService = request.app.state.service

    async def parse(raw: bytes, _scope: str) -> Completion:
        return parse_completion(raw, request.headers, service.config.max_messages)

    turn = await admitted(request, parse)
    return answer_all(service, turn, ChatFormat(service.config.model_name))


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model served here."""
    return {"object": "list", "data": [await _model(request)]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model by name."""
    if name != request.app.state.service.config.model_name:
        raise model_not_found(name)
    return await _model(request)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """This process runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Engine and store answer, and requests are taken; 503 names what is not so."""
    service: TurnService = request.app.state.service
    engine, answers = await asyncio.gather(_engine_answers(service), _store_answers(service))
    # A store that can be read may still refuse to write: a full disk, a lock.
    store = answers and not service.spool.is_waiting
    is_closing = service.replies.is_closing
    is_ready = engine and store and not is_closing
    status = "ok" if is_ready else "shutting_down" if is_closing else "unavailable"
    return JSONResponse(
        {"status": status, "engine": engine, "store": store},
        status_code=200 if is_ready else 503,
        headers={} if is_ready else {"Retry-After": str(service.config.retry_after_s)},
    )


@router.get("/metrics", dependencies=[Depends(admin_only)])
async def metrics(request: Request) -> Response:
    """Prometheus metrics, for admin keys."""
    data = request.app.state.service.metrics.exposition()
    return Response(data, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _model(request: Request) -> dict[str, Any]:
    """OpenAI's model, and the limits of requests for it; the context is null until it is known."""
    service: TurnService = request.app.state.service
    config = service.config
    context_length = await service.context_length()
    return {
        "id": config.model_name,
        "object": "model",
        "created": int(request.app.state.started),
        "owned_by": "policy",
        # As SGLang and vLLM name it, beside our own.
        "max_model_len": context_length,
        "limits": {
            "context_length": context_length,
            "max_output_tokens": config.max_output_tokens,
            "max_messages": config.max_messages,
            "max_body_bytes": config.max_body_bytes,
            "max_choices": MAX_CHOICES,
            "max_stops": MAX_STOPS,
        },
    }


async def _engine_answers(service: TurnService) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            # Not its health: an engine that loads weights has none for a while, and requests wait.
            await service.deps.engine.model_info()
    except (EngineError, TimeoutError):
        return False
    return True


async def _store_answers(service: TurnService) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await service.deps.store.latest_version()
    except (StoreError, TimeoutError):
        return False
    return True
