"""*Training*: curves over the steps of the run, and its newest versions."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from markupsafe import Markup
from pydantic import Field

from api_proxy.access.callers import caller_of
from api_proxy.errors import ApiError, invalid
from api_proxy.pages.measured import Curve
from api_proxy.pages.plots import RUN_LINES, series_names, svg
from api_proxy.pages.rendering import json_reply, page
from api_proxy.routes.hints_api import answered
from api_proxy.turns import TurnService
from records.types import PolicyVersion

router = APIRouter()

Text = Annotated[str, Query(max_length=20)]

Name = Annotated[str, Field(max_length=200)]
_VERSIONS = 50
MOST_RUNS = 4
"""Runs that can be laid over this one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a request wants to see: steps or versions from `first` to `last`, and which other runs
    are laid over this one.
    """

    first: str
    last: str
    runs: list[str]


def _asked(
    first: Text = "", last: Text = "", run: Annotated[list[Name] | None, Query()] = None
) -> _Asked:
    return _Asked(first=first, last=last, runs=list(dict.fromkeys(run or ())))


Asked = Annotated[_Asked, Depends(_asked)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Curves of this run and, by name, of those laid over it; `names` of all that could be."""

    own: list[Curve]
    others: dict[str, list[Curve]]
    names: list[str]

    def same(self, curve: Curve) -> dict[str, Curve]:
        """The curve of the same title in each other run that has it."""
        found = {
            name: next((one for one in curves if one.title == curve.title), None)
            for name, curves in self.others.items()
        }
        return {name: one for name, one in found.items() if one is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """A curve as the page shows it."""

    curve: Curve
    picture: Markup
    series: list[str]


@router.get("/ui/training")
async def training_page(request: Request, asked: Asked) -> Response:
    """Curves of this run, those of others over them, and the newest versions."""
    shown = await _curves(request, asked)
    drawn = None if shown is None else await asyncio.to_thread(_drawn, shown)
    return await page(
        request,
        "training.html.jinja",
        curves=drawn,
        asked=asked,
        runs=[] if shown is None else shown.names,
        run_lines=RUN_LINES,
        versions=[_version(one) for one in await _versions(request)],
    )


@router.get("/v1/runs/current/training")
async def training_json(request: Request, asked: Asked) -> Response:
    """The same as JSON."""
    shown = await _curves(request, asked)
    return json_reply(
        {
            "object": "training",
            "curves": None if shown is None else [_plain(one) for one in shown.own],
            "other_runs": {}
            if shown is None
            else {name: [_plain(one) for one in of] for name, of in shown.others.items()},
            "runs": [] if shown is None else shown.names,
            "versions": [_version(one) for one in await _versions(request)],
        }
    )


def _drawn(shown: _Shown) -> list[_Drawn]:
    found = []
    for curve in shown.own:
        others = shown.same(curve)
        found.append(
            _Drawn(curve=curve, picture=svg(curve, others), series=series_names(curve, others))
        )
    return found


async def _curves(request: Request, asked: _Asked) -> _Shown | None:
    """None if this endpoint does not know the run's folder. Raises ApiError."""
    if not caller_of(request).is_admin:
        raise ApiError(
            403,
            "Only an admin's key shows how the run trains: it concerns all tenants.",
            code="admin",
        )
    service: TurnService = request.app.state.service
    begin = _bound("first", asked.first, -math.inf)
    end = _bound("last", asked.last, math.inf)
    curves = service.deps.curves
    if curves is None:
        return None
    if len(asked.runs) > MOST_RUNS:
        raise invalid(f"'run' can be given at most {MOST_RUNS} times.", "run")

    def read() -> _Shown:
        def parts(found: list[Curve]) -> list[Curve]:
            return [one for one in (_part(of, begin, end) for of in found) if _has_value(one)]

        return _Shown(
            own=parts(curves.own()),
            others={name: parts(curves.of(name)) for name in asked.runs},
            names=curves.others(),
        )

    try:
        return await asyncio.to_thread(read)
    except KeyError as error:
        raise invalid(f"'run': there is no run {error} beside this one.", "run") from None


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
