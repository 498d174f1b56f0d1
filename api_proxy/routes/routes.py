"""The routes: chat completions, health, readiness, metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from api_proxy.access.admission import Body, admitted
from api_proxy.access.callers import admin_only
from api_proxy.reply.choices import answer_all
from api_proxy.reply.formats import ChatFormat
from api_proxy.request.completion import Completion, completion_of
from api_proxy.server.other_metrics import other_metrics
from api_proxy.turns import TurnService
from records.errors import StoreError
from rollout_bridge.engine.errors import EngineError

router = APIRouter()

_PROBE_TIMEOUT_S = 3.0


async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions; the answered turn is recorded."""
    service: TurnService = request.app.state.service

    async def parse(body: Body, _scope: str) -> Completion:
        return await service.workers.run(
            body.num_bytes, completion_of, body.fields, request.headers, body.limits
        )

    turn = await admitted(request, parse)
    return answer_all(service, turn, ChatFormat(turn.completion.fields.model))


@router.get("/health")
@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """This process runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Engine and store answer, and requests are accepted; 503 names what fails. `warnings` names
    sessions and keys whose turns are all dropped, and `training_stopped` says briefly why the
    policy no longer learns (null while it does); neither affects requests.
    """
    service: TurnService = request.app.state.service
    engine, answers = await asyncio.gather(_engine_answers(service), _store_answers(service))
    # A store that can be read may still refuse to write: a full disk, a lock.
    store = answers and not service.spool.is_waiting
    look = service.deps.why_stopped
    stopped = None if look is None else await asyncio.to_thread(look)
    is_closing = service.replies.is_closing
    is_ready = engine and store and not is_closing
    status = "ok" if is_ready else "shutting_down" if is_closing else "unavailable"
    return JSONResponse(
        {
            "status": status,
            "engine": engine,
            "store": store,
            "warnings": service.drop_watch.warnings(),
            # This can be read without a key: show no more than what stopped it.
            "training_stopped": None if stopped is None else stopped.partition(":")[0],
        },
        status_code=200 if is_ready else 503,
        headers={} if is_ready else {"Retry-After": str(service.config.retry_after_s)},
    )


@router.get("/metrics", dependencies=[Depends(admin_only)])
async def metrics(request: Request) -> Response:
    """Prometheus metrics of this process and of the run's others, for admin keys. Each of several
    workers has its samples under its own label, whichever of them answers.
    """
    service: TurnService = request.app.state.service
    if service.worker_metrics is None:
        own = service.metrics.exposition()
    else:
        # Into its file first: what another worker shows next must not be older.
        own = b""
        await service.worker_metrics.write()
    others = await asyncio.to_thread(other_metrics, service.deps.metrics_folder)
    return Response(
        own + others,
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def _engine_answers(service: TurnService) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            # Not its health: an engine that loads weights is unhealthy for a while, and requests
            # wait.
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
