"""RUN/guard_answers.json: answers to the canaries of the version that passed last.

The engine does not serve that version any more, so a new one is compared with it by what it
answered: KL(last good || new) is the mean of log pi_good - log pi_new over the tokens of its
answers, and the new version gives log pi_new. Only answers to the user's own canaries are kept, and
none to recorded requests, which their users may delete.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from records.types import Ids, Logprobs
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)

FILE = "guard_answers.json"
_AT_ONCE = 16


class Scorer(Protocol):
    """An engine's log-probs at temperature 1 of the ids from `start` on. Raises EngineError."""

    async def score(self, input_ids: Ids, start: int) -> Logprobs: ...


class KeptAnswer(BaseModel):
    """One answer `ids` to a prompt, and its log-probs when it was sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    canary: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


class LastGood(BaseModel):
    """The answers of the version that passed last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    answers: list[KeptAnswer]


def read_last_good(folder: Path) -> LastGood | None:
    """None before a version has passed, and if the file cannot be read; then the log says so."""
    path = folder / FILE
    try:
        return LastGood.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("%s cannot be read, and is written anew: %s", path, type(error).__name__)
        return None


def write_last_good(
    folder: Path, version: int, answers: Sequence[KeptAnswer], *, samples: int
) -> LastGood:
    """Keep up to `samples` answers to each canary; they replace those of an earlier version."""
    taken: Counter[str] = Counter()
    kept: list[KeptAnswer] = []
    for one in answers:
        taken[one.canary] += 1
        if taken[one.canary] <= samples:
            kept.append(one)
    good = LastGood(version=version, answers=kept)
    temporary = folder / f"{FILE}.new"
    temporary.write_text(good.model_dump_json() + "\n", encoding="utf-8")
    os.replace(temporary, folder / FILE)
    return good


async def kl_from(good: LastGood, model: Scorer) -> float | None:
    """KL(last good || model) in nats per token; None without a token. Raises EngineError."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def of_one(one: KeptAnswer) -> float:
        prompt, ids = np.asarray(one.prompt, np.int32), np.asarray(one.ids, np.int32)
        async with free:
            now = await model.score(np.concatenate([prompt, ids]), len(prompt))
        return float((np.asarray(one.logprobs, np.float64) - now).sum())

    answers = [one for one in good.answers if one.ids]
    sums = await all_or_none([of_one(one) for one in answers])
    tokens = sum(len(one.ids) for one in answers)
    return sum(sums) / tokens if tokens else None
