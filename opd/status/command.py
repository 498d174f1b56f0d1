"""`opd status`: shown once, or repeatedly until somebody stops it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opd.status.facts import Now, as_values, read_run
from opd.status.health import findings
from opd.status.text import lines


def show(
    config_file: Path, *, as_json: bool, every_s: float | None, say: Callable[[str], None]
) -> None:
    """Show the status of the run of `config_file`, every `every_s` seconds if that is given. JSON
    is then one line each time.
    """
    while True:
        say(_shown(config_file, as_json=as_json, is_repeated=every_s is not None))
        if every_s is None:
            return
        time.sleep(every_s)
        if not as_json:
            say("")


def _shown(config_file: Path, *, as_json: bool, is_repeated: bool) -> str:
    now = read_run(config_file)
    if not as_json:
        return "\n".join(lines(now))
    return json.dumps(with_health(now), ensure_ascii=False, indent=None if is_repeated else 2)


def with_health(now: Now) -> dict[str, Any]:
    """The facts and what is wrong, ready for JSON."""
    return as_values(now) | {"health": [asdict(one) for one in findings(now)]}
