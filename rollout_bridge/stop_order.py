"""RUN/stop: training ends at its next check. The order may give the reason, and the version to
serve.

An empty file is an order too. It stays until somebody deletes it: a run that was stopped for a
reason does not start again by itself. RUN/rollback, the order to go back, is known here by its name
only.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout_bridge.engine.served import ServedFile

STOP_FILE = "stop"
ROLLBACK_FILE = "rollback"
LOOK_EVERY_S = 1.0
"""Pause between two checks whether the order is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """`serve_version`: what the engines are to go back to, where its weights are kept."""

    reason: str = ""
    serve_version: int | None = None


def order_stop(folder: Path, order: StopOrder) -> None:
    """Write it, whole or not at all; an existing order stays."""
    if not (folder / STOP_FILE).exists():
        _write(folder, order)


def serve_newest(folder: Path) -> None:
    """Remove `serve_version` from a stop order: the newest version is to serve."""
    order = read_stop(folder)
    if order is not None and order.serve_version is not None:
        _write(folder, StopOrder(reason=order.reason))


def stop_and_serve(folder: Path, order: StopOrder) -> None:
    """Like `order_stop`, but in an existing order, which keeps its reason, `serve_version` is
    replaced.
    """
    known = read_stop(folder)
    reason = order.reason if known is None else known.reason
    _write(folder, StopOrder(reason=reason, serve_version=order.serve_version))


def _write(folder: Path, order: StopOrder) -> None:
    temporary = (folder / STOP_FILE).with_suffix(".new")
    temporary.write_text(json.dumps(asdict(order)) + "\n", encoding="utf-8")
    os.replace(temporary, folder / STOP_FILE)


def read_stop(folder: Path) -> StopOrder | None:
    """The order, if there is one; any other text becomes its reason."""
    try:
        text = (folder / STOP_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    try:
        return StopOrder(**json.loads(text)) if text else StopOrder()
    except (TypeError, ValueError):
        return StopOrder(reason=text)


def goes_back(folder: Path) -> bool:
    """Whether the run has been told to go back to an older version, and is not there yet. Raises
    EngineUnavailable for a damaged RUN/served.json.
    """
    if (folder / ROLLBACK_FILE).exists():
        return True
    order = read_stop(folder)
    if order is None or order.serve_version is None:
        return False
    # The order keeps its version. With adapters, the file says when that one serves; without them,
    # the version is taken out of the order.
    served = ServedFile(folder).current()
    return served is None or served.label != str(order.serve_version)


def why_stopped(folder: Path) -> str | None:
    """Why training has been told to end; None: it has not."""
    order = read_stop(folder)
    return None if order is None else order.reason or "on request"
