"""Sends all canaries to a model, and measures its answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import regex

from opd.guard.canaries import Canary, Function, load_function
from opd.guard.last_good import KeptAnswer, Scorer
from opd.guard.limits import repeated_share
from opd.rehearsal.policy_sampler import Answer, PolicySampler
from records.messages import Message, content_text
from records.types import Ids
from rollout_bridge.bootstrap import mean_estimate
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.guard.checks import Checked, Figures
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)
_RESAMPLES = 1_000
"""A hundred canaries then take the event loop some milliseconds."""


class Judge(Protocol):
    """Decides whether an answer does what `words` ask; None: no majority. Raises
    ServiceUnavailable.
    """

    async def followed(
        self,
        words: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        response: Message,
    ) -> bool | None: ...


class State(Protocol):
    """A recorded request (`records.types.TurnRecord`)."""

    @property
    def prompt_ids(self) -> Ids: ...
    @property
    def tools(self) -> list[dict[str, Any]]: ...
    @property
    def sampling(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One answer, and its numbers."""

    answer: Answer
    ids: Sequence[int]
    logprobs: list[float]
    surprise: float | None
    kl_sum: float | None


def _figures(answers: Sequence[_Measured]) -> Figures:
    tokens = sum(len(one.ids) for one in answers)
    kls = [one.kl_sum for one in answers if one.kl_sum is not None]
    surprises = [one.surprise for one in answers if one.surprise is not None]
    return Figures(
        kl=sum(kls) / tokens if kls and tokens else None,
        tokens=tokens / len(answers) if answers else None,
        surprise=fmean(surprises) if surprises else None,
        repeated=fmean(repeated_share(one.ids) for one in answers) if answers else None,
    )


def _upper_bound(surprises: Sequence[tuple[float, str]], *, seed: int) -> float | None:
    """Of the 95% interval of their mean, resampled by canary; None if there is no interval."""
    if not surprises:
        return None
    values, canaries = zip(*surprises, strict=True)
    interval = mean_estimate(values, canaries, seed=seed, resamples=_RESAMPLES).interval
    return None if interval is None else interval.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A version's results on the canaries, and its answers to them."""

    row: Checked
    answers: list[KeptAnswer]


@dataclass(slots=True, kw_only=True)
class Asker:
    """Asks canaries. A function that hung once is not called again by this process."""

    canaries: Sequence[Canary]
    rendering: Rendering
    start: Scorer
    """The frozen start model."""
    judge: Judge
    timeout_s: float
    _hung: set[str] = field(default_factory=set)
    _prompts: dict[str, Ids] = field(default_factory=dict)

    async def ask(self, model: PolicySampler, *, version: int, samples: int) -> Asked:
        """`samples` answers to each canary. Raises EngineError, ServiceUnavailable."""
        began = time.monotonic()
        asked = [canary for canary in self.canaries for _ in range(samples)]
        results = await all_or_none([self._ask(model, canary) for canary in asked])
        decided = [
            (canary.name, is_right)
            for canary, (_, is_right) in zip(asked, results, strict=True)
            if is_right is not None
        ]
        figures = _figures([measured for measured, _ in results])
        surprises = [
            (measured.surprise, canary.name)
            for canary, (measured, _) in zip(asked, results, strict=True)
            if measured.surprise is not None
        ]
        row = Checked(
            **figures.model_dump(),
            version=version,
            time=time.time(),
            passed=sum(is_right for _, is_right in decided),
            asked=len(decided),
            undecided=len(results) - len(decided),
            surprise_most=_upper_bound(surprises, seed=version),
            failed=dict(Counter(name for name, is_right in decided if not is_right)),
            took_s=time.monotonic() - began,
        )
        answers = [
            KeptAnswer(
                canary=canary.name,
                prompt=self._prompts[canary.name].tolist(),
                ids=list(measured.ids),
                logprobs=measured.logprobs,
            )
            for canary, (measured, _) in zip(asked, results, strict=True)
        ]
        return Asked(row=row, answers=answers)

    async def measure(
        self, model: PolicySampler, states: Sequence[State], *, samples: int
    ) -> Figures:
        """`samples` answers to each recorded request. Raises EngineError."""
        found = await all_or_none(
            [self._of_state(model, state) for state in states for _ in range(samples)]
        )
        return _figures([one for one in found if one is not None])

    async def _of_state(self, model: PolicySampler, state: State) -> _Measured | None:
        """None for a request that is too long for the engine by now."""
        thinking = state.sampling.get("enable_thinking")
        try:
            return await self._measured(model, state.prompt_ids, state.tools, thinking)
        except EngineRejected as error:
            logger.warning("a recorded request is not asked again: %s", error)
            return None

    async def _ask(self, model: PolicySampler, canary: Canary) -> tuple[_Measured, bool | None]:
        """An answer, and whether it is right (None: undecided)."""
        prompt = self._prompts.get(canary.name)
        if prompt is None:
            prompt = self.rendering.prompt_ids(canary.conversation, canary.tools)
            self._prompts[canary.name] = prompt
        measured = await self._measured(model, prompt, canary.tools)
        return measured, await self._is_right(canary, measured.answer)

    async def _measured(
        self,
        model: PolicySampler,
        prompt: Ids,
        tools: Sequence[dict[str, Any]],
        enable_thinking: bool | None = None,
    ) -> _Measured:
        answer = await model.answer(prompt, tools, enable_thinking=enable_thinking)
        ids = np.asarray(answer.rollout.ids, dtype=np.int32)
        own = np.asarray(answer.rollout.logprobs, dtype=np.float32)
        kl_sum = None
        if len(ids):
            start = await self.start.score(np.concatenate([prompt, ids]), len(prompt))
            kl_sum = float((own - start).sum())
        return _Measured(
            answer=answer,
            ids=ids.tolist(),
            logprobs=own.tolist(),
            surprise=float(-own.mean()) if len(own) else None,
            kl_sum=kl_sum,
        )

    async def _is_right(self, canary: Canary, answer: Answer) -> bool | None:
        text = answer_text(answer.message)
        if canary.contains is not None:
            return canary.contains in text
        if canary.matches is not None:
            return await self._found(canary.name, canary.matches, text)
        if canary.function is not None:
            return await self._called(canary.name, canary.function, text)
        assert canary.follows is not None
        return await self.judge.followed(
            canary.follows, canary.conversation, canary.tools, answer.message
        )

    async def _found(self, name: str, pattern: str, text: str) -> bool | None:
        """Whether the pattern is found; None if it backtracks for too long."""
        search = partial(regex.search, pattern, text, timeout=self.timeout_s, concurrent=True)
        try:
            return await asyncio.to_thread(search) is not None
        except TimeoutError:
            logger.error("canary %s: 'matches' took more than %g s", name, self.timeout_s)
            return None

    async def _called(self, name: str, path: str, text: str) -> bool | None:
        """What the user's function returns; None if it fails or hangs."""
        if path in self._hung:
            return None
        try:
            return await _in_daemon(load_function(path), text, self.timeout_s)
        except TimeoutError:
            self._hung.add(path)
            logger.error(
                "canary %s: %s took more than %g s; it is not called again until the run restarts",
                name,
                path,
                self.timeout_s,
            )
        except Exception as error:
            logger.warning("canary %s: %s raised %s: %s", name, path, type(error).__name__, error)
        return None


async def _in_daemon(function: Function, text: str, timeout_s: float) -> bool:
    """Call a function in a thread that may hang without keeping the process alive. Raises
    TimeoutError, and what the function raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def tell(result: bool | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(bool(result))

    def call() -> None:
        try:
            result, error = function(text), None
        except Exception as raised:
            result, error = None, raised
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=call, daemon=True, name="canary").start()
    async with asyncio.timeout(timeout_s):
        return await done


def answer_text(message: Message) -> str:
    """What a canary's check reads: the content, then a line for each call."""
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join([content_text(message.get("content")), *calls]).strip()
