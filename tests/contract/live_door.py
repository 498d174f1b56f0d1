"""The proxy served over an engine whose weights change while agents ask, and what to check of it.

Two sets of weights are made of the lab's model so that they hardly ever end a reply by themselves:
a reply is as long as asked for, and any update falls into some of them.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import PauseMode
from rollout_bridge.rendering.rendering import Rendering
from tests.records.new_store import new_store
from trainer.publishing.publish import PublishedWeights, Publisher

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
FIRST_VERSION = 100


def write_endless(model: Path, folder: Path, seed: int) -> Path:
    """The model's weights with noise, and with nothing that would make an end token likely."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensors[name] = (tensor.float() + 0.5 * noise).to(tensor.dtype)
        if name == "model.embed_tokens.weight":
            tensors[name][[0, 2]] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Forward:
    """Log-probs of given ids by one plain forward pass, under any published version."""

    def __init__(self, folders: tuple[Path, Path]) -> None:
        self._models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in folders
        ]

    def __call__(self, ids: np.ndarray, start: int, version: int) -> np.ndarray:
        """[T - start] log-probs at temperature 1 of ids[start:] [T]."""
        ids_1T = torch.as_tensor(ids.astype(np.int64))[None]
        with torch.inference_mode():
            logprobs_TV = self._models[version % 2](ids_1T).logits[0].log_softmax(-1)
        return logprobs_TV[start - 1 : -1].gather(1, ids_1T[0, start:, None])[:, 0].numpy()


@dataclass(kw_only=True)
class Answer:
    """What an agent got for one request, and when (monotonic clock)."""

    turn_id: str
    finish_reason: str | None
    completion_tokens: int
    logprobs: list[float]
    asked: float
    answered: float


@dataclass(kw_only=True)
class Update:
    """One publication: `begun` before the pause, `ended` after the engine went on."""

    version: int
    begun: float
    ended: float


@dataclass(kw_only=True)
class LiveDoor:
    """A served proxy over a live engine, and a publisher as the trainer has it."""

    agent: openai.AsyncOpenAI
    base_url: str
    store: Store
    client: EngineClient
    publisher: Publisher
    folders: tuple[Path, Path]
    updates: list[Update] = field(default_factory=list)
    num_chunks: int = 0
    """Pieces of streamed replies that agents have got so far."""

    def weights(self, version: int) -> PublishedWeights:
        """The two folders in turn."""
        return PublishedWeights(version=version, path=str(self.folders[version % 2]))

    async def publish(self) -> None:
        """The next version: even ones are the first folder's weights, odd ones the second's."""
        version = self.updates[-1].version + 1 if self.updates else FIRST_VERSION
        begun = time.monotonic()
        assert await self.publisher.publish(self.weights(version)) == []
        self.updates.append(Update(version=version, begun=begun, ended=time.monotonic()))

    async def in_the_midst(
        self, num_chunks: int, asking: Sequence[asyncio.Task[Answer]] = ()
    ) -> None:
        """Wait until streamed replies have gone on by this many pieces; raises where all that are
        `asking` have ended before.
        """
        enough = self.num_chunks + num_chunks
        while self.num_chunks < enough:
            if asking and all(task.done() for task in asking):
                raise AssertionError(f"all replies ended: {[task.result() for task in asking]}")
            await asyncio.sleep(0.005)

    async def ask(self, messages: list[dict[str, Any]], stream: bool, **fields: Any) -> Answer:
        """One request. Whatever is not a whole answer raises."""
        request: Any = {
            "model": "policy",
            "messages": messages,
            "temperature": 1.0,
            "logprobs": True,
            **fields,
        }
        asked = time.monotonic()
        if stream:
            return await self._ask_streamed(request, asked)
        reply = await self.agent.chat.completions.create(**request)
        choice = reply.choices[0]
        return Answer(
            turn_id=reply.id.removeprefix("chatcmpl-"),
            finish_reason=choice.finish_reason,
            completion_tokens=reply.usage.completion_tokens,
            logprobs=[entry.logprob for entry in choice.logprobs.content],
            asked=asked,
            answered=time.monotonic(),
        )

    async def _ask_streamed(self, request: dict[str, Any], asked: float) -> Answer:
        name, reason, count = "", None, 0
        logprobs: list[float] = []
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self.agent.chat.completions.create(**request, **options):
            name = chunk.id
            self.num_chunks += 1
            count = chunk.usage.completion_tokens if chunk.usage else count
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.logprobs:
                    logprobs += [entry.logprob for entry in choice.logprobs.content]
        return Answer(
            turn_id=name.removeprefix("chatcmpl-"),
            finish_reason=reason,
            completion_tokens=count,
            logprobs=logprobs,
            asked=asked,
            answered=time.monotonic(),
        )

    async def turn(self, answer: Answer) -> TurnRecord:
        """What the store holds of an answer."""
        turn = await self.store.turn(answer.turn_id)
        assert turn is not None
        return turn

    async def metric(self, name: str) -> float:
        """A sample of the proxy's metrics."""
        text = (await self.agent._client.get(f"{self.base_url}/metrics")).text
        return next(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
        )

    def allowed_versions(self, answer: Answer) -> range:
        """What can have sampled an answer, by the publications' times."""
        oldest = max(u.version for u in self.updates if u.ended <= answer.asked)
        newest = max(u.version for u in self.updates if u.begun <= answer.answered)
        return range(oldest, newest + 1)


@asynccontextmanager
async def live_door(
    engine_url: str,
    rendering: Rendering,
    folders: tuple[Path, Path],
    store_folder: Path,
    mode: PauseMode,
    **settings: Any,
) -> AsyncIterator[LiveDoor]:
    """Serve the proxy in front of the engine; its first version is published."""
    async with (
        await Store.open(new_store(store_folder / "records.db")) as store,
        EngineClient(engine_url, vocab_size=rendering.vocab_size) as client,
    ):
        deps = ProxyDeps(
            store=store,
            engine=client,
            rendering=rendering,
            config=ProxyConfig(**settings),
            pause_mode=mode,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(create_app(deps), log_level="warning", access_log=False)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with openai.AsyncOpenAI(
                base_url=f"{base_url}/v1", api_key="key", max_retries=0, timeout=120
            ) as agent:
                door = LiveDoor(
                    agent=agent,
                    base_url=base_url,
                    store=store,
                    client=client,
                    publisher=Publisher({"policy": client}, mode=mode),
                    folders=folders,
                )
                await door.publish()
                yield door
        finally:
            server.should_exit = True
            await serving
