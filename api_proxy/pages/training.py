"""*Training*: curves over the steps of the run, and its newest versions."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from api_proxy.access.callers import caller_of
from api_proxy.errors import ApiError, invalid
from api_proxy.measured import Curve
from api_proxy.pages.plots import svg
from api_proxy.pages.rendering import json_reply, page
from api_proxy.routes.hints_api import answered
from api_proxy.turns import TurnService
from records.types import PolicyVersion

router = APIRouter()

Text = Annotated[str, Query(max_length=20)]

_VERSIONS = 50


@router.get("/ui/training")
async def training_page(request: Request, first: Text = "", last: Text = "") -> Response:
    """Curves from step or version `first` to `last`, and the newest versions."""
    curves = await _curves(request, first, last)
    drawn = None
    if curves is not None:
        shown = curves
        drawn = await asyncio.to_thread(lambda: [(one, svg(one)) for one in shown])
    return await page(
        request,
        "training.html.jinja",
        curves=drawn,
        first=first,
        last=last,
        versions=[_version(one) for one in await _versions(request)],
    )


@router.get("/v1/runs/current/training")
async def training_json(request: Request, first: Text = "", last: Text = "") -> Response:
    """The same as JSON."""
    curves = await _curves(request, first, last)
    return json_reply(
        {
            "object": "training",
            "curves": None if curves is None else [_plain(one) for one in curves],
            "versions": [_version(one) for one in await _versions(request)],
        }
    )


async def _curves(request: Request, first: str, last: str) -> list[Curve] | None:
    """None if this endpoint does not know the run's folder."""
    if not caller_of(request).is_admin:
        raise ApiError(
            403,
            "Only an admin's key shows how the run trains: it concerns all tenants.",
            code="admin",
        )
    service: TurnService = request.app.state.service
    begin, end = _bound("first", first, -math.inf), _bound("last", last, math.inf)
    if service.deps.curves is None:
        return None
    found = await asyncio.to_thread(service.deps.curves)
    return [one for one in (_part(curve, begin, end) for curve in found) if _has_value(one)]


def _has_value(curve: Curve) -> bool:
    return any(value is not None for values in curve.series.values() for value in values)


def _bound(name: str, value: str, default: float) -> float:
    if not value:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise invalid(f"'{name}' must be a whole number.", name)
    return int(value)


def _part(curve: Curve, begin: float, end: float) -> Curve:
    kept = [at for at, step in enumerate(curve.steps) if begin <= step <= end]
    return replace(
        curve,
        steps=[curve.steps[at] for at in kept],
        series={name: [values[at] for at in kept] for name, values in curve.series.items()},
    )


async def _versions(request: Request) -> list[PolicyVersion]:
    service: TurnService = request.app.state.service
    return await answered(service, service.deps.store.newest_versions(_VERSIONS))


def _version(one: PolicyVersion) -> dict[str, Any]:
    return {
        "version": one.version,
        "parent_version": one.parent_version,
        "created": one.created_at,
        "restores": one.restores,
        "given_up": one.abandoned,
    }


def _plain(curve: Curve) -> dict[str, Any]:
    return {
        "title": curve.title,
        "unit": curve.unit,
        "says": curve.says,
        "over": curve.step_unit,
        "steps": list(curve.steps),
        "series": {
            name: [None if value is None or not math.isfinite(value) else value for value in values]
            for name, values in curve.series.items()
        },
        "marks": dict(curve.marks),
    }
