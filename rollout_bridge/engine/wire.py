"""The engine's replies, checked and turned into values. Pure: no I/O.

All strict checks are here: ids must be the requested ones, log-probs finite and exactly as many as
tokens; anything else raises EngineProtocolError. It knows no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
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

_EARLY_ABORT = "Aborted by AbortReq."


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
    """The message, from any of the error shapes that engines use."""
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
    output = _output(reply, meta)
    text = str(reply.get("text", ""))
    return _finished(meta, output, text, num_input, experts_topk)


def read_generations(reply: Any, num_input: int, number: int) -> list[Generation]:
    """`number` finished replies: a list of them, if there are several."""
    replies = [reply] if number == 1 else reply
    if not isinstance(replies, list) or len(replies) != number:
        count = len(replies) if isinstance(replies, list) else replies
        raise EngineProtocolError(f"asked for {number} continuations, got {count}")
    return [read_generation(one, num_input) for one in replies]


def _finished(
    meta: dict[str, Any], output: _Output, text: str, num_input: int, experts_topk: int
) -> Generation:
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
            output_ids=np.array(output.ids, dtype=np.int32),
            output_logprobs=np.array(output.logprobs, dtype=np.float32),
            text=text,
            finish_reason=finish["type"],
            matched=finish.get("matched"),
            weight_version=meta.get("weight_version"),
            weight_spans=_spans(meta.get("weight_versions")),
            prompt_tokens=num_input,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            routed_experts=read_experts(
                meta.get("routed_experts"), num_input + len(output.ids), experts_topk
            ),
            top=tuple(output.top),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise EngineProtocolError(str(error)) from error


def nothing_sampled(num_input: int) -> Generation:
    """What is left of a request that was aborted before it began, as of one that waited."""
    return Generation(
        output_ids=np.empty(0, dtype=np.int32),
        output_logprobs=np.empty(0, dtype=np.float32),
        text="",
        finish_reason="abort",
        matched=None,
        weight_version=None,
        weight_spans=None,
        prompt_tokens=num_input,
        cached_tokens=0,
    )


def is_early_abort(refusal: EngineRejected) -> bool:
    """Whether a request was aborted, not refused: SGLang refuses one that is aborted while its
    grammar is being compiled.
    """
    return refusal.message == _EARLY_ABORT


def of_version(generation: Generation, version: ServedVersion | None) -> Generation:
    """The generation, labelled with `version` if one was named: an adapter never changes, so all
    tokens are of that version, whatever the base's label.
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
    """Whether the engine aborted the request before it was done."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    return isinstance(meta, dict) and _is_abort(meta)


@dataclass(slots=True)
class _Output:
    """Sampled ids, their log-probs, and the most probable tokens at each, if requested."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)

    def add(self, other: _Output, start: int) -> None:
        """Append what `other` has from `start` on."""
        self.ids += other.ids[start:]
        self.logprobs += other.logprobs[start:]
        self.top += other.top[start:]


class StreamReader:
    """Turns the events of one stream into chunks of new tokens.

    An engine's events carry either all tokens so far or only the new ones, and count all of them,
    which shows the kind. A stream is of one kind throughout.
    """

    def __init__(self, num_input: int, experts_topk: int = 0):
        self._num_input = num_input
        self._experts_topk = experts_topk
        self._output = _Output()
        self._text: list[str] = []
        self._is_cumulative: bool | None = None
        self.finished = False

    def read(self, events: Sequence[bytes]) -> GenerationChunk:
        """The tokens that `events` (JSON, in order, at least one) add.

        Raises EngineProtocolError for what is not JSON, if earlier tokens changed, or if some are
        missing; EngineRejected for an error event.
        """
        seen, final = len(self._output.ids), None
        # If events carry everything, the last one has all that the others have.
        for event in events[-1:] if self._is_cumulative else events:
            final = self._take(event)
        new = self._output
        return GenerationChunk(
            new_ids=tuple(new.ids[seen:]),
            new_logprobs=tuple(new.logprobs[seen:]),
            new_top=tuple(new.top[seen:]),
            final=final,
        )

    def _take(self, data: bytes) -> Generation | None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineProtocolError(f"an event is not JSON: {error}") from error
        raise_if_error(event)
        meta = _meta(event)
        found = _output(event, meta)
        seen = len(self._output.ids)
        overlap = self._overlap(len(found.ids), seen, meta)
        if overlap and found.ids[:overlap] != self._output.ids:
            raise EngineProtocolError(f"the first {overlap} ids of a stream changed")
        self._output.add(found, overlap)
        if self._is_cumulative:
            self._text.clear()
        self._text.append(str(event.get("text") or ""))
        self.finished = meta.get("finish_reason") is not None
        if not self.finished:
            return None
        text = "".join(self._text)
        return _finished(meta, self._output, text, self._num_input, self._experts_topk)

    def _overlap(self, num: int, seen: int, meta: dict[str, Any]) -> int:
        """How many of an event's `num` tokens are repeated: all `seen` before, or none."""
        count = meta.get("completion_tokens")
        if not seen and count in (num, None):
            return 0
        is_cumulative = count in (num, None)
        is_last_of_all = _is_abort(meta)
        if not is_cumulative and count != seen + num:
            raise EngineProtocolError(
                f"an event has {num} tokens after {seen}, and counts {count} in all"
            )
        if self._is_cumulative not in (None, is_cumulative) and not is_last_of_all:
            raise EngineProtocolError("a stream changed from new tokens to all tokens, or back")
        self._is_cumulative = is_cumulative
        return seen if is_cumulative else 0


def read_score(
    reply: Any, input_ids: list[int], start: int, vocab_size: int | None = None
) -> Logprobs:
    """Log-probs [len(input_ids) - start] of `input_ids[start:]` from a scoring reply.

    The request started at `start - 1`, because the first entry of `input_token_logprobs` is null
    whatever the start; that entry is checked and dropped.
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


def read_score_tokens(
    reply: Any, input_ids: list[int], start: int, token_ids: Sequence[int]
) -> Logprobs:
    """Log-probs [R, len(token_ids)] of the same tokens at each scored position."""
    entries = _scored_entries(reply, "input_token_ids_logprobs", input_ids, start)
    expected = list(token_ids)
    found: list[list[float]] = []
    for position, row in enumerate(entries[1:], start=start):
        if not isinstance(row, list) or not all(map(_is_pair, row)):
            raise EngineProtocolError(f"expected log-probs of given ids at position {position}")
        if [_integer(item[1]) for item in row] != expected:
            raise EngineProtocolError(f"log-probs of other ids than asked at position {position}")
        found.append([_finite(item[0]) for item in row])
    return np.array(found, dtype=np.float32)


def read_model_info(info: Any, models: Any) -> ModelInfo:
    """From the replies of /model_info and, if that has no context length, /v1/models."""
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


def _output(reply: dict[str, Any], meta: dict[str, Any]) -> _Output:
    ids = reply.get("output_ids")
    entries = meta.get("output_token_logprobs")
    if not isinstance(ids, list) or not isinstance(entries, list):
        raise EngineProtocolError("reply without output_ids or output_token_logprobs")
    count = meta.get("completion_tokens")
    if _is_abort(meta) and ids and len(entries) > len(ids) and isinstance(count, int):
        # SGLang, if a stream carries only new tokens: on an abort it sends the last id with the
        # log-probs of all tokens, including some that it had not sent yet.
        entries = entries[-count:]
        ids = _ids_of(entries, ids[-1])
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
    return _Output(ids, logprobs, list(_top(meta, len(ids))))


def _ids_of(entries: list[Any], last: Any) -> list[int]:
    if not all(map(_is_pair, entries)) or entries[-1][1] != last:
        raise EngineProtocolError("output_token_logprobs are of other ids than output_ids")
    return [_integer(entry[1]) for entry in entries]


def _is_abort(meta: dict[str, Any]) -> bool:
    finish = meta.get("finish_reason")
    return isinstance(finish, dict) and finish.get("type") == "abort"


def _raise_if_refused(finish: dict[str, Any]) -> None:
    """SGLang accepts a request before it has compiled its grammar. If the grammar is bad, it aborts
    the request with the status of a refusal.
    """
    status = finish.get("status_code")
    if finish["type"] == "abort" and isinstance(status, int) and 400 <= status < 500:
        raise EngineRejected(status, str(finish.get("message") or "refused"))


def _top(meta: dict[str, Any], num_tokens: int) -> tuple[TopLogprobs, ...]:
    """The most probable tokens at each position, () if they were not requested."""
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

    SGLang reports the vocabulary's last id as 0, in order to hide the placeholders of images; its
    log-prob is still that of the id that was sent.
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
