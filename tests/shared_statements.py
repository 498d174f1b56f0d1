"""Compiles each statement once per process, not once for each store that a test opens.

SQLAlchemy keeps compiled statements by dialect and engine, and every store has its own. Compiling
takes a third of what a test of the store takes. Engines of one driver behave alike here, so those
that come later use the dialect and the compiled statements of the first.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import Dialect

_MOST = 10_000
_first: dict[str, tuple[Dialect, dict[Any, Any]]] = {}


@event.listens_for(Engine, "engine_connect")
def _share(connection: Any) -> None:
    """Once it has connected, an engine's dialect knows its server."""
    engine = connection.engine
    dialect, compiled = _first.setdefault(engine.dialect.driver, (engine.dialect, {}))
    if "compiled_cache" not in engine.get_execution_options():
        engine.dialect = dialect
        engine.update_execution_options(compiled_cache=compiled)
    if len(compiled) > _MOST:
        compiled.clear()
