"""The teachers that engines serve: each has a name, and must never change.

A turn is routed to one of them by a key. Scores of two weight versions of a teacher are scores of
two teachers, so a version that changes ends the stage. It knows neither turns nor the store.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from records.types import Ids, Logprobs
from rollout_bridge.config import ScoringConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import ForeignTokens
from rollout_bridge.engine.types import ModelInfo, ScoredTokens
from rollout_bridge.scoring.replicas import Replicas
from rollout_bridge.worker import StageStopped


class TeacherChanged(StageStopped):
    """The teacher is not (or no longer) the frozen one: its scores would mix two teachers."""


class Teacher(Protocol):
    """What scoring needs from an engine client."""

    async def score(
        self, input_ids: Ids, start: int, *, routing_key: str | None = None
    ) -> Logprobs: ...
    async def score_with_topk(
        self, input_ids: Ids, start: int, k: int, *, routing_key: str | None = None
    ) -> ScoredTokens: ...
    async def score_tokens(
        self, input_ids: Ids, start: int, token_ids: Ids, *, routing_key: str | None = None
    ) -> Logprobs: ...
    async def model_info(self) -> ModelInfo: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """Log-probs [R] under one prompt, top-k [R, K] if requested, and the version that gave them."""

    version: str
    logprobs: Logprobs
    topk_ids: Ids | None
    topk_logprobs: Logprobs | None
    latency_s: float


async def scores_of(
    engine: Teacher, ids: Ids, start: int, top_k: int, *, routing_key: str | None = None
) -> ScoredTokens:
    """An engine's log-probs of `ids` from `start` on, with its `top_k` likeliest tokens if that is
    not 0. Raises EngineError, and ValueError for ids that it does not have.
    """
    if top_k:
        return await engine.score_with_topk(ids, start, top_k, routing_key=routing_key)
    return ScoredTokens(logprobs=await engine.score(ids, start, routing_key=routing_key))


class FrozenTeacher:
    """One teacher on an engine, or on several that take turns (`others`).

    Without `expected_version`, the first version that it reports counts; without `context_length`,
    the length that it reports.
    """

    def __init__(
        self,
        name: str,
        client: Teacher,
        *others: Teacher,
        expected_version: str | None = None,
        context_length: int | None = None,
        top_k: int = 0,
    ) -> None:
        self.name = name
        self._engines = Replicas((client, *others))
        self._top_k = top_k
        self._version = expected_version
        self._max_tokens = context_length

    async def max_tokens(self) -> int:
        """Most tokens of hinted prompt and response together. Raises TeacherChanged."""
        if self._max_tokens is None:
            info = await self._engines.first(lambda engine: engine.model_info())
            self._check_frozen(info)
            self._max_tokens = info.context_length or sys.maxsize
        return self._max_tokens

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, routing_key: str | None = None
    ) -> TeacherScores:
        """Its scores of `response_ids` after `prompt_ids`. Raises EngineError, TeacherChanged.

        SGLang's router sends requests with one `routing_key` to one server.
        """
        ids, start = np.concatenate([prompt_ids, response_ids]), len(prompt_ids)
        started = time.monotonic()

        async def ask(engine: Teacher) -> tuple[ScoredTokens, float, ModelInfo]:
            scored = await scores_of(engine, ids, start, self._top_k, routing_key=routing_key)
            latency_s = time.monotonic() - started
            # Asked AFTER the scores: labels are never used twice, so an unchanged one means that no
            # update came before or during the call.
            return scored, latency_s, await engine.model_info()

        try:
            scored, latency_s, info = await self._engines.first(ask)
        except ValueError as error:
            # A policy can sample an id of its head that the tokenizer does not have.
            raise ForeignTokens(f"ids that cannot be scored: {error}") from error
        version = self._check_frozen(info)
        return TeacherScores(
            version=version,
            logprobs=scored.logprobs,
            topk_ids=scored.topk_ids,
            topk_logprobs=scored.topk_logprobs,
            latency_s=latency_s,
        )

    async def score_tokens(
        self, input_ids: Ids, start: int, token_ids: Ids, *, routing_key: str | None = None
    ) -> Logprobs:
        """Its log-probs of `token_ids` [R, K] at the positions from `start`. Raises EngineError,
        TeacherChanged.
        """

        async def ask(engine: Teacher) -> tuple[Logprobs, ModelInfo]:
            found = await engine.score_tokens(input_ids, start, token_ids, routing_key=routing_key)
            return found, await engine.model_info()

        try:
            found, info = await self._engines.first(ask)
        except ValueError as error:
            raise ForeignTokens(f"ids that cannot be scored: {error}") from error
        self._check_frozen(info)
        return found

    def _check_frozen(self, info: ModelInfo) -> str:
        # An empty name would mean that no engine scored.
        version = info.weight_version or "unnamed"
        if self._version is None:
            self._version = version
        if version != self._version:
            raise TeacherChanged(
                f"{self.name}: the teacher must stay at weight version {self._version!r}, but "
                f"reports {version!r}: start it again with its frozen weights, or "
                "start a new run"
            )
        return self._version


class Teachers:
    """The run's own teacher, and the further ones that the configuration names.

    The further ones are asked in the same way: same timeouts, same vocabulary.
    """

    def __init__(self, own: Teacher, config: ScoringConfig) -> None:
        self._default = config.default_teacher or config.teacher
        settings = own.config if isinstance(own, EngineClient) else None
        vocab_size = own.vocab_size if isinstance(own, EngineClient) else None
        self._opened = {
            name: [
                EngineClient(
                    url, config=settings, vocab_size=vocab_size, keys=config.keys_of_teacher(name)
                )
                for url in config.urls_of_teacher(name)
            ]
            for name in config.teachers
        }
        self._by_name = {
            config.teacher: FrozenTeacher(
                config.teacher,
                own,
                expected_version=config.expected_version,
                context_length=config.context_length,
                top_k=config.top_k,
            )
        } | {
            name: FrozenTeacher(name, *clients, top_k=config.top_k)
            for name, clients in self._opened.items()
        }

    def of(self, key: str | None) -> FrozenTeacher | None:
        """The teacher of turns with this key; None if there is none with this name."""
        return self._by_name.get(self._default if key is None else key)

    async def close(self) -> None:
        """Close the clients that were opened here; the run's own teacher belongs to the caller."""
        for clients in self._opened.values():
            for client in clients:
                await client.close()
