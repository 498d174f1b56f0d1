"""What the policy's engines make of fixed texts when a job starts: their part of the calibration.

The texts travel with the job's first batch as rows without turns, so that slime's own forward pass
before the step scores them; the advantage hook compares (ALGORITHMS 1.10). It knows no slime.
"""

from __future__ import annotations

from dataclasses import dataclass

from records.types import Ids, Logprobs
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.config import EngineClientConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """ids [T] and the engine's log-probs [T - 1] of ids[1:], at temperature 1; `bound` is that of
    the whole calibration, for the mean |engine - trainer| in nats.
    """

    ids: Ids
    logprobs: Logprobs
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """How a job is calibrated; for `bound` see `Probe`. Ids are below `vocab_size`, the rows of the
    model's head (None: not known).
    """

    model: str
    vocab_size: int | None
    renderer: RendererConfig
    client: EngineClientConfig
    seed: int
    bound: float
