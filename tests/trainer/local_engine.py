"""An engine inside the test process: loads weights from folders and scores with them.

Only the transport is missing. `fail` makes its next calls of a name raise, `calls` records all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel

from rollout_bridge.engine.errors import EngineRejected, EngineUnavailable
from rollout_bridge.engine.served import ServedSource
from rollout_bridge.engine.types import Generation, SamplingParams
from tests.trainer.tiny import load
from trainer.calibration.calibrate import own_logprobs
from trainer.model.lora import known_warnings
from trainer.model.policy import Policy


@dataclass(frozen=True)
class Info:
    weight_version: str


class LocalEngine:
    """`served`: the file that says which adapter answers, as the engine client's requests do.
    `refuses_adapters`: why it takes none. `compiling`: how often it does not empty its cache.
    """

    def __init__(self, path: str, version: str = "0"):
        self.version = version
        self.loaded: dict[str, str] = {}
        self.served: ServedSource | None = None
        self.refuses_adapters: str | None = None
        self._adapted: dict[str, Policy] = {}
        self.paused = False
        self.is_empty = False
        self.compiling = 0
        self.calls: list[str] = []
        self.modes: list[str] = []
        self.fail: Counter[str] = Counter()
        self.start = path
        self._load(path)

    def _load(self, path: str) -> None:
        self.path = path
        self.policy = load(Path(path)).freeze()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail[name] > 0:
            self.fail[name] -= 1
            raise EngineUnavailable(f"{name} fails for the test")

    async def pause(self, mode: str) -> None:
        self._call("pause")
        self.modes.append(mode)
        self.paused = True

    async def flush_cache(self) -> None:
        self._call("flush_cache")
        assert self.paused
        if self.compiling:
            self.compiling -= 1
            raise EngineRejected(400, "a grammar is being compiled")
        self.is_empty = True

    async def resume(self) -> None:
        self._call("resume")
        self.paused = self.is_empty = False

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = True) -> None:
        self._call("update_weights")
        assert self.paused
        assert not flush_cache
        assert self.is_empty is (self.modes[-1] != "in_place")
        self._load(path)
        self.version = version

    async def load_adapter(self, name: str, path: str) -> None:
        self._call("load_adapter")
        if self.refuses_adapters is not None:
            raise EngineRejected(400, self.refuses_adapters)
        with known_warnings():
            model = PeftModel.from_pretrained(load(Path(self.start)).model, path)
        self._adapted[name] = Policy(model, dtype="float32", chunk_tokens=1024).freeze()
        self.loaded[name] = path

    async def unload_adapter(self, name: str) -> None:
        self._call("unload_adapter")
        del self.loaded[name]

    async def adapters(self) -> list[str]:
        self._call("adapters")
        return list(self.loaded)

    def restart(self) -> None:
        """As a process that comes up again from its start weights."""
        self._load(self.start)
        self.version = "0"
        self.loaded.clear()

    @property
    def current(self) -> str:
        """The version that answers now."""
        now = None if self.served is None else self.served.current()
        return self.version if now is None else now.label

    @property
    def answering(self) -> Policy:
        """What answers now."""
        now = None if self.served is None else self.served.current()
        if now is None or now.adapter is None:
            return self.policy
        assert now.adapter.name in self.loaded, "requests name what is loaded"
        return self._adapted[now.adapter.name]

    async def base_info(self) -> Info:
        self._call("base_info")
        return Info(weight_version=self.version)

    async def model_info(self) -> Info:
        self._call("model_info")
        return Info(weight_version=self.current)

    async def score(self, input_ids: np.ndarray, start: int) -> np.ndarray:
        self._call("score")
        answering = self.answering
        return own_logprobs(answering, answering.device)(input_ids)[start - 1 :]

    async def score_tokens(
        self, input_ids: np.ndarray, start: int, token_ids: np.ndarray, *, routing_key: str
    ) -> np.ndarray:
        self._call("score_tokens")
        with torch.no_grad():
            logits = self.answering.base_model(torch.from_numpy(input_ids)[None].long()).logits[0]
        rows = logits.log_softmax(-1)[start - 1 : -1]
        return rows.gather(-1, torch.from_numpy(token_ids).long()).numpy()

    async def generate(self, input_ids: np.ndarray, params: SamplingParams) -> Generation:
        self._call("generate")
        ids, policy = np.asarray(input_ids), self.answering
        for _ in range(params.max_new_tokens):
            with torch.no_grad():
                logits = policy.base_model(torch.from_numpy(ids)[None].long()).logits[0, -1]
            token = int(torch.multinomial(logits.softmax(-1), 1))
            ids = np.append(ids, np.int32(token)).astype(np.int32)
        return Generation(
            output_ids=ids[len(input_ids) :],
            output_logprobs=own_logprobs(policy, policy.device)(ids)[len(input_ids) - 1 :],
            text="",
            finish_reason="length",
            matched=None,
            weight_version=self.current,
            weight_spans=None,
            prompt_tokens=len(input_ids),
            cached_tokens=0,
        )
