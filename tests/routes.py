"""All routes of an application, those of included routers among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import FastAPI
from starlette.routing import BaseRoute


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """(method, path) of each."""
    found = set(_walk(app.routes))
    assert found, "no route found: does the framework keep them elsewhere by now?"
    return found


def _walk(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _walk(included.routes)
        for method in getattr(route, "methods", None) or ():
            yield method, getattr(route, "path", "")
