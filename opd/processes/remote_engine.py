"""A server that the run did not start: may it be the policy's engine, or the frozen one?

Checked once, before anything else is started, so that an old server, a wrong flag or a wrong model
gives one clear line and not an odd figure an hour later. Faults that only show in numbers
(precision, other weights) are left to calibration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from opd.run.config import EngineConfig, RunConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineError, EngineRejected, EngineUnavailable
from rollout_bridge.engine.server_info import QUEUE_SINCE, SPANS_SINCE, ServerInfo, shown
from rollout_bridge.engine.types import ModelInfo, SamplingParams
from trainer.errors import ConfigError

Role = Literal["policy", "frozen"]

PROBE_TEMPERATURE = 0.5
PROBE_TOKENS = 8
PROBE_TOP_K = 64
_CLEAR_NATS = 0.1
"""Two log-probs that differ by more can be told apart in any precision."""


async def check_engine(role: Role, config: RunConfig, vocab_size: int) -> list[str]:
    """Ask the engine at `config.<role>.url`; returns warnings.

    A policy engine is made to load the start weights, as version 0: it must be able to read the
    folders of this run, and may still have the weights of an earlier run. Raises ConfigError with a
    line for each thing that is wrong.
    """
    engine: EngineConfig = getattr(config, role)
    url, settings, keys = engine.base_url, config.engine_client, engine.keys
    async with EngineClient(url, config=settings, vocab_size=vocab_size, keys=keys) as client:
        try:
            info = await client.server_info()
            problems = [*info.problems, *_unfit_kind(role, info, config)]
            if not problems:
                model = await client.model_info()
                problems = _unfit_model(role, model, config)
                problems += await _unfit_vocabulary(client, info, model, vocab_size)
            if not problems and role == "policy":
                problems = await _unfit_policy(client, absolute(config.model))
        except EngineUnavailable as error:
            raise ConfigError(
                f"{role}.url: no engine answers at {url} ({error}); start it first, and wait until "
                "it has loaded its model"
            ) from None
        except EngineRejected as refusal:
            if refusal.status not in (401, 403):
                raise ConfigError(
                    f"{role}.url: what answers at {url} is not an engine: {refusal}"
                ) from None
            given = "another key" if engine.api_key else "a key"
            raise ConfigError(
                f"{role}.url: the engine at {url} requires {given}: set {role}.api_key to its "
                f"--api-key (and {role}.admin_api_key to its --admin-api-key)"
            ) from None
        except EngineError as error:
            raise ConfigError(
                f"{role}.url: what answers at {url} is not an engine: {error}"
            ) from None
    if problems:
        raise ConfigError("\n".join(f"{role}.url: {url}: {problem}" for problem in problems))
    return [f"{role}.url: {warning}" for warning in _warnings(role, info)]


def _unfit_kind(role: Role, info: ServerInfo, config: RunConfig) -> list[str]:
    if info.kind == "router":
        if role == "policy":
            return [
                "it is a router, which does not pass weight updates on: give the address of the "
                "one server behind it"
            ]
        if info.num_workers == 0:
            return ["it is a router with no workers: start a server and register it"]
    mode = config.trainer.pause_mode
    if role == "policy" and not info.keeps_its_queue and mode != "abort":
        return [
            f"{info.name} ends if its weights change while requests wait in its queue, as they do "
            f"under trainer.pause_mode {mode}: set that to abort, or install {shown(QUEUE_SINCE)}"
        ]
    wanted = config.engine_client.routed_experts_topk
    if role == "policy" and wanted and info.returns_routed_experts is False:
        return [
            "engine_client.routed_experts_topk asks for the experts, which it does not return: "
            "start it with --enable-return-routed-experts"
        ]
    return []


def _unfit_model(role: Role, model: ModelInfo, config: RunConfig) -> list[str]:
    length, needed = model.context_length, config.scoring.context_length
    if length is None or needed is None or role == "policy" or length >= needed:
        return []
    problems = [
        f"it accepts {length} tokens, and scoring.context_length is {needed}: set that to "
        f"{length}, or start the server with --context-length {needed}"
    ]
    judge = config.judge
    if judge.base_url == f"{config.frozen.base_url}/v1" and (
        judge.max_prompt_tokens + judge.max_tokens > length
    ):
        problems.append(
            f"judge.max_prompt_tokens {judge.max_prompt_tokens} and judge.max_tokens "
            f"{judge.max_tokens} exceed {length} together: set judge.max_prompt_tokens = "
            f"{length - judge.max_tokens}"
        )
    return problems


async def _unfit_vocabulary(
    client: EngineClient, info: ServerInfo, model: ModelInfo, vocab_size: int
) -> list[str]:
    """An id beyond the server's vocabulary would end the server, and the run with it."""
    served = model.vocab_size
    if served is None and info.checks_vocabulary:
        served = await client.served_vocab_size()
    if served is None or served == vocab_size:
        return []
    return [
        f"it serves {model.model_path} with {served} token ids, and the run's model has "
        f"{vocab_size}: start it with the run's model"
    ]


async def _unfit_policy(client: EngineClient, start_weights: str) -> list[str]:
    try:
        # Requests that an earlier run left behind would keep the cache; nobody waits for them.
        await client.pause("abort")
        try:
            await client.update_weights(start_weights, "0")
        finally:
            await client.resume()
    except EngineError as error:
        return [
            f"it cannot load the start weights from {start_weights} ({error}): it must see the "
            "run's model and run folder under the same paths"
        ]
    if await _ignores_temperature(client):
        return [
            "its log-probs are not at the sampling temperature: unset SGLANG_RETURN_ORIGINAL_"
            "LOGPROB where it is started"
        ]
    return []


async def _ignores_temperature(client: EngineClient) -> bool:
    """Whether sampled log-probs are those at temperature 1 although another one was requested."""
    params = SamplingParams(
        temperature=PROBE_TEMPERATURE, max_new_tokens=PROBE_TOKENS, ignore_eos=True
    )
    prompt = [0, 1, 2]
    generation = await client.generate(prompt, params)
    ids = prompt + generation.output_ids.tolist()
    k = min(PROBE_TOP_K, client.vocab_size or PROBE_TOP_K)
    scored = await client.score_with_topk(ids, len(prompt), k)
    assert scored.topk_logprobs is not None
    expected = at_temperature(scored.logprobs, scored.topk_logprobs, PROBE_TEMPERATURE)
    told_apart = np.abs(expected - scored.logprobs) > _CLEAR_NATS
    to_expected = np.abs(generation.output_logprobs - expected)[told_apart]
    to_original = np.abs(generation.output_logprobs - scored.logprobs)[told_apart]
    return bool(told_apart.any() and (to_original < to_expected).all())


def absolute(model: str) -> str:
    """A local folder by its full path, since the server runs elsewhere; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def at_temperature(
    logprobs_R: NDArray[np.float32], topk_logprobs_RK: NDArray[np.float32], temperature: float
) -> NDArray[np.float32]:
    """Log-probs [R] at `temperature` < 1 from those at 1 and from the k largest of each position.

    log softmax(l / T) = log p / T - log sum_v p_v^(1/T). The sum runs over the k most probable v;
    below temperature 1 the rest adds next to nothing.
    """
    scaled_RK = topk_logprobs_RK / temperature
    return logprobs_R / temperature - np.logaddexp.reduce(scaled_RK, axis=1)


def _warnings(role: Role, info: ServerInfo) -> list[str]:
    if role == "policy" and info.reports_spans is False:
        return [
            f"{info.name} does not report which weights sampled which token (SGLang "
            f"{shown(SPANS_SINCE)} does): replies during a weight update are dropped as "
            "unknown_version"
        ]
    return []
