"""The embedded engine as one object: model, scheduler thread, and what the routes need from them.

Handlers run in the event loop that calls `start`. If the scheduler's thread fails, every request
ends with an error and `on_failure` is called: an engine that cannot compute must not look alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.errors import AdapterRejected, BadRequest
from rollout_bridge.embedded.model import loading
from rollout_bridge.embedded.model.adapters import Adapter, read_adapter
from rollout_bridge.embedded.model.grammar import GrammarCompiler
from rollout_bridge.embedded.model.kv_cache import CacheShape, RowCache
from rollout_bridge.embedded.model.prefix_cache import PrefixCache
from rollout_bridge.embedded.model.rows import Rows
from rollout_bridge.embedded.model.runner import ModelRunner
from rollout_bridge.embedded.model.sampling import Sampler
from rollout_bridge.embedded.model.self_check import check_cached_forward
from rollout_bridge.embedded.model.threads import set_threads
from rollout_bridge.embedded.scheduling.request import EngineRequest, Finish
from rollout_bridge.embedded.scheduling.scheduler import Scheduler
from rollout_bridge.embedded.server.prompts import Prompts
from rollout_bridge.rendering.stop_ids import model_stop_ids

logger = logging.getLogger(__name__)

_GIB = 2**30
_STEP_COST = {True: 2**19, False: 2**27}
"""`max_step_cost` if it is unset, on a CPU (True) and elsewhere (False)."""


class Engine:
    """Loads the model on construction; raises UnsupportedModel when it cannot be served."""

    def __init__(self, config: EmbeddedEngineConfig):
        self.config = config
        self.model_path = config.model
        self.tokenizer = loading.load_tokenizer(config)
        self._model = loading.load_model(config)
        set_threads(config.threads, self._model)
        self.context_length = loading.context_length(self._model, config)
        self.stop_token_ids = frozenset(model_stop_ids(config.model, self.tokenizer))
        runner = ModelRunner(self._model, self.context_length)
        self._layers = runner.adapters
        self._adapters: dict[str, Adapter] = {}
        self._adapter_paths: dict[str, str] = {}
        self.vocab_size = runner.vocab_size
        shape = runner.cache_shape()
        row_tokens, prefix_tokens = _memory(config, shape, self.context_length)
        check_cached_forward(runner, shape)
        self._scheduler = Scheduler(
            rows=Rows(runner, RowCache(shape, row_tokens), PrefixCache(shape, prefix_tokens)),
            sampler=Sampler(runner.device, config.seed),
            tokenizer=self.tokenizer,
            version=config.weight_version,
            max_batch=config.max_batch,
            max_prefill_tokens=config.max_prefill_tokens,
            max_step_cost=config.max_step_cost or _STEP_COST[runner.device.type == "cpu"],
            notify=self._notify,
        )
        self.grammars = GrammarCompiler(
            self.tokenizer, self.vocab_size, self.stop_token_ids, config.max_grammar_bytes
        )
        self.prompts = Prompts(self.tokenizer, config.model, self.context_length)
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def weight_version(self) -> str:
        """Label of the weights in use."""
        return self._scheduler.version

    @property
    def load(self) -> dict[str, int]:
        """Requests running and waiting now."""
        scheduler = self._scheduler
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.not_running),
        }

    @property
    def alive(self) -> bool:
        """Whether the scheduler's thread can serve."""
        return self.failure is None and self._thread.is_alive()

    def start(self) -> None:
        """Start the scheduler's thread; call it inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End all requests and the threads."""
        self.prompts.close()
        self._scheduler.call(lambda: self._scheduler.abort(None))
        self._scheduler.stop()
        self._thread.join(timeout=10)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; `request.context` (an asyncio.Event) is set when there is news.

        Raises BadRequest when it cannot be served.
        """
        self._check(request)
        request.context = asyncio.Event()
        if self.failure is not None:
            request.error = self.failure
            request.context.set()
            return
        future = self._scheduler.call(lambda: self._scheduler.submit(request))
        future.add_done_callback(lambda done: done.exception() and self._fail([request]))

    async def abort(self, rid: str | None) -> None:
        """End one request, or all if None."""
        await self._call(lambda: self._scheduler.abort(rid))

    async def pause(self, mode: str) -> None:
        """Stop computing; requests wait."""
        await self._call(lambda: self._scheduler.pause(mode))

    async def resume(self) -> None:
        """Go on."""
        await self._call(self._scheduler.resume)

    async def flush(self) -> None:
        """Forget cached prefixes."""
        await self._call(self._scheduler.flush)

    async def update_weights(self, path: str, version: str | None, keep_cache: bool) -> int:
        """Exchange the weights for those in folder `path`; returns the requests affected.

        Raises WeightsRejected; the weights are then unchanged.
        """
        rounded = self.config.model if self.config.rounds_start else None
        affected = await self._call(
            lambda: self._scheduler.exchange_weights(
                lambda: loading.load_weights(self._model, path, rounded), version, keep_cache
            )
        )
        self.model_path = path
        return affected

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that are loaded, and the folder of each."""
        return {name: adapter.path for name, adapter in self._adapters.items()}

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of this name; None for the base. Raises BadRequest if it is not loaded."""
        if name is None:
            return None
        if name not in self._adapters:
            loaded = ", ".join(self._adapters) or "none"
            raise BadRequest(f"The LoRA adapter {name!r} is not loaded (loaded: {loaded}).")
        return self._adapters[name]

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in folder `path`, so that requests can name it.

        A name belongs to one folder for good: what was computed under it stays in the prefix cache.
        Raises AdapterRejected; the loaded adapters are then unchanged.
        """
        if not name or name in self._adapters:
            raise AdapterRejected(f"a LoRA adapter named {name!r} is already loaded")
        if self._adapter_paths.get(name, path) != path:
            other = self._adapter_paths[name]
            raise AdapterRejected(f"{name!r} was the adapter in {other}: use a new name")
        adapter = await asyncio.to_thread(read_adapter, name, path, self._model, self.config.model)

        def install() -> None:
            self._layers.fit(adapter)
            self._adapter_paths[name] = path
            self._adapters[name] = adapter

        await self._call(install)

    async def unload_adapter(self, name: str) -> None:
        """Requests can no longer name it; those that already did keep it. Raises AdapterRejected if
        it is not loaded.
        """
        if self._adapters.pop(name, None) is None:
            raise AdapterRejected(f"no LoRA adapter named {name!r} is loaded")

    async def _call(self, function: Callable[[], Any]) -> Any:
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return await asyncio.wrap_future(self._scheduler.call(function))

    def _check(self, request: EngineRequest) -> None:
        num_input = len(request.input_ids)
        new = request.sampling.max_new_tokens
        if num_input > self.context_length or (num_input == self.context_length and new > 0):
            raise BadRequest(
                f"The input ({num_input} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )
        if num_input + new > self.context_length:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of "
                f"{self.context_length} tokens. You requested a total of {num_input + new} tokens: "
                f"{num_input} tokens from the input messages and {new} tokens for the completion."
            )
        ids = (*request.input_ids, *request.token_ids, *(i for i, _ in request.sampling.logit_bias))
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise BadRequest(f"Token ids must be in [0, {self.vocab_size}).")

    def _notify(self, requests: list[EngineRequest]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_wake, requests)

    def _run(self) -> None:
        try:
            self._scheduler.run()
        except Exception as error:  # The thread is lost: report it everywhere, then let it end.
            logger.exception("the scheduler failed")
            self.failure = f"the engine failed: {type(error).__name__}: {error}"
            scheduler = self._scheduler
            scheduler.refuse_calls(RuntimeError(self.failure))
            self._fail([*scheduler.running, *scheduler.not_running])
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self.on_failure)

    def _fail(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            request.error = self.failure or "the engine could not take the request"
            request.finish = Finish(kind="abort", message=request.error)
        self._notify(requests)


def _wake(requests: list[EngineRequest]) -> None:
    for request in requests:
        request.context.set()


def _memory(config: EmbeddedEngineConfig, shape: CacheShape, context: int) -> tuple[int, int]:
    """How many tokens there is memory for, in rows and in the prefix cache."""
    on_gpu = shape.device.type == "cuda"
    rows_gib, prefix_gib = config.cache_gib(on_gpu=on_gpu)
    free = torch.cuda.mem_get_info(shape.device)[0] / _GIB if on_gpu else 0.0
    rows_gib = 0.4 * free if rows_gib is None else rows_gib
    prefix_gib = 0.15 * free if prefix_gib is None else prefix_gib
    row_tokens = int(rows_gib * _GIB / shape.bytes_per_token)
    return max(row_tokens, context + 1), int(prefix_gib * _GIB / shape.bytes_per_token)
