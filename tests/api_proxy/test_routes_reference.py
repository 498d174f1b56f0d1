"""The reference of routes is the application's routes, each with what it does."""

from __future__ import annotations

import re

from supply import site
from tests.api_proxy.conftest import Door
from tests.routes import routes_of


async def test_every_route_is_in_the_reference(door: Door) -> None:
    rows = re.findall(r"^\| ([A-Z]+) \| `([^`]+)` \| (.*) \|$", site.routes(), flags=re.MULTILINE)
    assert sorted((method, path) for method, path, _ in rows) == sorted(routes_of(door.app))
    for _, path, said in rows:
        assert said.endswith((".", "`.")), path
