"""The engine's replies, checked and turned into values. Pure: no I/O.

Everything strict happens here: ids must be the ids asked about, log-probs finite and exactly as
many as tokens; anything else raises EngineProtocolError. It does not know HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from records.types import Ids, Logprobs
from rollout_bridge.engine.errors import EngineLogprobError, EngineProtocolError, EngineRejected
from rollout_bridge.engine.experts import read_experts
from rollout_bridge.engine.served import ServedVersion
from rollout_bridge.engine.types import (
    Generation,
    GenerationChunk,
    ModelInfo,
    TopLogprobs,
    WeightSpan,
)


def checked_ids(input_ids: Sequence[int] | Ids, vocab_size: int | None) -> list[int]:
    """The ids as a list of int; raises ValueError when empty or outside [0, vocab_size).

    An id outside the vocabulary kills an SGLang server, so it must not leave this process.
    """
    ids_T = np.asarray(input_ids)
    if ids_T.ndim != 1 or ids_T.size == 0:
        raise ValueError(f"input ids must be one non-empty sequence, got shape {ids_T.shape}")
    if not np.issubdtype(ids_T.dtype, np.integer):
        raise ValueError(f"input ids must be integers, got {ids_T.dtype}")
    low, high = int(ids_T.min()), int(ids_T.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bad = low if low < 0 else high
        raise ValueError(f"input id {bad} is outside the vocabulary of {vocab_size}")
    return ids_T.tolist()


def error_message(body: Any, fallback: str) -> str:
    """The message in any of the error shapes that engines answer with."""
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, str):
            return error
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return error["message"]
        for key in ("detail", "error_message"):
            if isinstance(body.get(key), str):
                return body[key]
    return fallback


def read_generation(reply: Any, num_input: int, experts_topk: int = 0) -> Generation:
    """A finished reply of /generate for a prompt of `num_input` tokens."""
    meta = _meta(reply)
    ids, logprobs = _output_tokens(reply, meta)
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict) or finish.get("type") not in ("stop", "length", "abort"):
        raise EngineProtocolError(f"unknown finish reason {finish!r}")
    _raise_if_refused(finish)
    # SGLang counts no prompt for a request that is aborted while it waits for its turn.
    uncounted = finish["type"] == "abort" and "prompt_tokens" not in meta
    if meta.get("prompt_tokens") != num_input and not uncounted:
        raise EngineProtocolError(
            f"sent {num_input} prompt tokens, the engine counted {meta.get('prompt_tokens')}"
        )
    try:
        return Generation(
            output_ids=np.array(ids, dtype=np.int32),
            output_logprobs=np.array(logprobs, dtype=np.float32),
            text=str(reply.get("text", "")),
            finish_reason=finish["type"],
            matched=finish.get("matched"),
            weight_version=meta.get("weight_version"),
            weight_spans=_spans(meta.get("weight_versions")),
            prompt_tokens=num_input,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            routed_experts=read_experts(
                meta.get("routed_experts"), num_input + len(ids), experts_topk
            ),
            top=_top(meta, len(ids)),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise EngineProtocolError(str(error)) from error


def of_version(generation: Generation, version: ServedVersion | None) -> Generation:
    """As sampled by the adapter of `version`, where one was named: an adapter stays what it is, so
    all tokens are of that version, whatever the base is called.
    """
    if version is None:
        return generation
    span = WeightSpan(version=version.label, start=0, end=len(generation.output_ids))
    return replace(generation, weight_version=version.label, weight_spans=(span,))


def read_adapters(models: Any) -> list[str]:
    """Names of the adapters in a reply of /v1/models."""
    try:
        return [str(model["id"]) for model in models["data"] if model.get("parent") is not None]
    except (TypeError, KeyError, AttributeError) as error:
        raise EngineProtocolError("/v1/models lists no models") from error


def raise_if_error(event: Any) -> None:
    """Raise EngineRejected for an error event of a stream."""
    if isinstance(event, dict) and "error" in event:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        status = code if isinstance(code, int) else 400
        raise EngineRejected(status, error_message(event, "error event"))


def is_aborted(reply: Any) -> bool:
    """Whether the engine broke the request off before it was done."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(finish, dict) and finish.get("type") == "abort"


class StreamReader:
    """Turns cumulative events of one stream into chunks of new tokens."""

    def __init__(self, num_input: int, experts_topk: int = 0):
        self._num_input = num_input
        self._experts_topk = experts_topk
        self._ids: list[int] = []
        self.finished = False

    def read(self, event: Any) -> GenerationChunk:
        """The tokens that `event` adds; raises EngineProtocolError if earlier ones changed.

        Raises EngineRejected for an error event.
        """
        raise_if_error(event)
        meta = _meta(event)
        ids, logprobs = _output_tokens(event, meta)
        seen = len(self._ids)
        if ids[:seen] != self._ids:
            raise EngineProtocolError(f"the first {seen} ids of a stream changed")
        self._ids = ids
        top = _top(meta, len(ids))
        self.finished = meta.get("finish_reason") is not None
        final = None
        if self.finished:
            final = read_generation(event, self._num_input, self._experts_topk)
        return GenerationChunk(
            new_ids=tuple(ids[seen:]),
            new_logprobs=tuple(logprobs[seen:]),
            new_top=top[seen:],
            final=final,
        )


def read_score(
    reply: Any, input_ids: list[int], start: int, vocab_size: int | None = None
) -> Logprobs:
    """Log-probs [len(input_ids) - start] of `input_ids[start:]` from a scoring reply.

    The request started at `start - 1`, because the first entry of `input_token_logprobs` is null
    at whatever start is asked; that entry is checked and dropped.
    """
    entries = _scored_entries(reply, "input_token_logprobs", input_ids, start)
    first = entries[0]
    if not _is_entry(first, input_ids[start - 1], vocab_size) or first[0] is not None:
        raise EngineProtocolError(f"the first scored entry must be null, got {first!r}")
    logprobs = []
    for entry, expected in zip(entries[1:], input_ids[start:], strict=True):
        if not _is_entry(entry, expected, vocab_size):
            raise EngineProtocolError(f"scored {entry!r} where id {expected} was sent")
        logprobs.append(_finite(entry[0]))
    return np.array(logprobs, dtype=np.float32)


def read_score_topk(
    reply: Any, input_ids: list[int], start: int, k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k most probable ids at each scored position: ids [R, k] and log-probs [R, k]."""
    entries = _scored_entries(reply, "input_top_logprobs", input_ids, start)
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for position, row in enumerate(entries[1:], start=start):
        if not isinstance(row, list) or len(row) != k or not all(map(_is_pair, row)):
            raise EngineProtocolError(f"expected {k} top log-probs at position {position}")
        ids.append([_integer(item[1]) for item in row])
        logprobs.append([_finite(item[0]) for item in row])
    return np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def read_model_info(info: Any, models: Any) -> ModelInfo:
    """From the replies of /model_info and, where that has no context length, /v1/models."""
    if not isinstance(info, dict) or "weight_version" not in info:
        raise EngineProtocolError("/model_info without weight_version")
    context_length = info.get("context_length")
    if context_length is None:
        try:
            context_length = models["data"][0].get("max_model_len")
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise EngineProtocolError("/v1/models lists no model") from error
    return ModelInfo(
        model_path=str(info.get("model_path", "")),
        weight_version=str(info["weight_version"]),
        vocab_size=info.get("vocab_size"),
        context_length=context_length,
    )


def _meta(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
        raise EngineProtocolError("reply without meta_info")
    return reply["meta_info"]


def _output_tokens(reply: dict[str, Any], meta: dict[str, Any]) -> tuple[list[int], list[float]]:
    ids = reply.get("output_ids")
    entries = meta.get("output_token_logprobs")
    if not isinstance(ids, list) or not isinstance(entries, list):
        raise EngineProtocolError("reply without output_ids or output_token_logprobs")
    if len(ids) != len(entries):
        raise EngineProtocolError(f"{len(ids)} output ids but {len(entries)} log-probs")
    try:
        logprobs = [entry[0] for entry in entries]
        if [entry[1] for entry in entries] != ids:
            raise EngineProtocolError("output_token_logprobs are of other ids than output_ids")
        if not all(map(math.isfinite, logprobs)):
            raise EngineProtocolError("an output log-prob is not finite")
    except (TypeError, IndexError, KeyError) as error:
        raise EngineProtocolError(f"malformed output log-probs: {error}") from error
    return ids, logprobs


def _raise_if_refused(finish: dict[str, Any]) -> None:
    """SGLang takes a request before it has compiled its grammar; one whose grammar is no good it
    breaks off with the status of a refusal.
    """
    status = finish.get("status_code")
    if finish["type"] == "abort" and isinstance(status, int) and 400 <= status < 500:
        raise EngineRejected(status, str(finish.get("message") or "refused"))


def _top(meta: dict[str, Any], num_tokens: int) -> tuple[TopLogprobs, ...]:
    """The most probable tokens at each position, () if they were not asked for."""
    rows = meta.get("output_top_logprobs")
    if not rows:
        return ()
    if not isinstance(rows, list) or len(rows) != num_tokens:
        raise EngineProtocolError(f"output_top_logprobs do not fit {num_tokens} output ids")
    for row in rows:
        if not isinstance(row, list) or not all(map(_is_pair, row)):
            raise EngineProtocolError(f"malformed output_top_logprobs: {row!r}")
    return tuple(tuple((_integer(item[1]), _finite(item[0])) for item in row) for row in rows)


def _scored_entries(reply: Any, field: str, input_ids: list[int], start: int) -> list[Any]:
    entries = _meta(reply).get(field)
    expected = len(input_ids) - start + 1
    if not isinstance(entries, list) or len(entries) != expected:
        count = len(entries) if isinstance(entries, list) else entries
        raise EngineProtocolError(f"{field}: expected {expected} entries, got {count}")
    return entries


def _spans(value: Any) -> tuple[WeightSpan, ...] | None:
    if value is None:
        return None
    return tuple(
        WeightSpan(version=str(item["version"]), start=int(item["start"]), end=int(item["end"]))
        for item in value
    )


def _is_entry(value: Any, expected: int, vocab_size: int | None) -> bool:
    """Whether it is [logprob, id, ...] of the id `expected`.

    SGLang names the last id of the vocabulary as 0, meaning to hide the placeholders of images,
    though its log-prob is that of the id that was sent.
    """
    if not _is_pair(value):
        return False
    is_last = vocab_size is not None and expected == vocab_size - 1
    return value[1] == expected or (is_last and value[1] == 0)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 2


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineLogprobError(f"a scored log-prob is {value!r}")
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineProtocolError(f"a token id is {value!r}")
    return value
