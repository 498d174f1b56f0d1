"""An engine inside the test process: loads weights from folders and scores with them.

Only the transport is missing. `fail` makes its next calls of a name raise, `calls` records all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from rollout_bridge.engine.errors import EngineUnavailable
from rollout_bridge.engine.types import Generation, SamplingParams
from tests.trainer.tiny import load
from trainer.calibrate import own_logprobs


@dataclass(frozen=True)
class Info:
    weight_version: str


class LocalEngine:
    def __init__(self, path: str, version: str = "0"):
        self.version = version
        self.paused = False
        self.calls: list[str] = []
        self.modes: list[str] = []
        self.fail: Counter[str] = Counter()
        self._load(path)

    def _load(self, path: str) -> None:
        self.path = path
        self.policy = load(path).freeze()
        self._score = own_logprobs(self.policy, self.policy.device)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail[name] > 0:
            self.fail[name] -= 1
            raise EngineUnavailable(f"{name} fails for the test")

    async def pause(self, mode: str) -> None:
        self._call("pause")
        self.modes.append(mode)
        self.paused = True

    async def resume(self) -> None:
        self._call("resume")
        self.paused = False

    async def update_weights(self, path: str, version: str, *, flush_cache: bool) -> None:
        self._call("update_weights")
        assert self.paused
        assert flush_cache is (self.modes[-1] != "in_place")
        self._load(path)
        self.version = version

    async def model_info(self) -> Info:
        self._call("model_info")
        return Info(weight_version=self.version)

    async def score(self, input_ids: np.ndarray, start: int) -> np.ndarray:
        self._call("score")
        return self._score(input_ids)[start - 1 :]

    async def generate(self, input_ids: np.ndarray, params: SamplingParams) -> Generation:
        self._call("generate")
        ids = np.asarray(input_ids)
        for _ in range(params.max_new_tokens):
            with torch.no_grad():
                logits = self.policy.base_model(torch.from_numpy(ids)[None].long()).logits[0, -1]
            token = int(torch.multinomial(logits.softmax(-1), 1))
            ids = np.append(ids, np.int32(token)).astype(np.int32)
        return Generation(
            output_ids=ids[len(input_ids) :],
            output_logprobs=self._score(ids)[len(input_ids) - 1 :],
            text="",
            finish_reason="length",
            matched=None,
            weight_version=self.version,
            weight_spans=None,
            prompt_tokens=len(input_ids),
            cached_tokens=0,
        )
