"""What the endpoint is given by the process that runs it. It knows no request."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_proxy.config import ProxyConfig
from api_proxy.generation import GeneratingEngine
from api_proxy.pages.measured import Curves, HintVersion
from api_proxy.sharing.sharing import Sharing
from records.reading.waiting_limits import WaitingLimits
from records.store import Store
from rollout_bridge.config import TeacherRoutes
from rollout_bridge.engine.hold_file import HoldFile
from rollout_bridge.engine.types import PauseMode
from rollout_bridge.rendering.rendering import Rendering


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyDeps:
    """What the proxy depends on. `clock` gives unix seconds; `pause_mode` is how the trainer
    changes the engine's weights; in `metrics_folder`, other processes of the run write their
    metrics; `hold` is where the trainer's schedule may hold generation, None where it never does.
    `waiting` is what turns wait for; None: only the idle timeout is known. `routes` choose teachers
    for turns. `hint_versions` reads, in a thread, what was measured for a hint; None: not known
    here. `teacher` answers hinted prompts when a page asks for it; None: it cannot be asked.
    `run_status` reads the status of the whole run, as `opd status --json` prints it; None: not
    known here. `curves` is what this run and others measured step by step, and `why_stopped` reads,
    in a thread, why training has stopped, None while it goes on. `sharing` is what this process has
    in common with the other workers of its endpoint.
    """

    store: Store
    engine: GeneratingEngine
    rendering: Rendering
    config: ProxyConfig
    clock: Callable[[], float] = time.time
    pause_mode: PauseMode = "retract"
    metrics_folder: Path | None = None
    hold: HoldFile | None = None
    waiting: WaitingLimits | None = None
    routes: TeacherRoutes = field(default_factory=TeacherRoutes)
    hint_versions: Callable[[str], list[HintVersion]] | None = None
    teacher: GeneratingEngine | None = None
    run_status: Callable[[], Awaitable[dict[str, Any]]] | None = None
    curves: Curves | None = None
    why_stopped: Callable[[], str | None] | None = None
    sharing: Sharing = field(default_factory=Sharing.alone)
