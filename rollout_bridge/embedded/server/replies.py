"""Replies of /generate, in SGLang's shape.

Events of a stream carry only what is new, as SGLang's with `--incremental-streaming-output`, so
that a token costs the same at the end of a long response as at its beginning.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollout_bridge.embedded.scheduling.request import EngineRequest, TopLogprobs
from rollout_bridge.embedded.server.schemas import GenerateBody
from rollout_bridge.embedded.server.text import TextStream, final_text


class ReplyWriter:
    """Writes the replies to one request."""

    def __init__(self, request: EngineRequest, body: GenerateBody, tokenizer: Any, version: str):
        self._request = request
        self._body = body
        self._tokenizer = tokenizer
        self._version = version
        self._text: TextStream | None = None
        # What may begin a stop string must not be sent until it is known that it does not.
        self._held_back = max((len(stop) - 1 for stop in request.sampling.stop), default=0)
        self._sent_text = 0
        self._decoded = 0
        self._count = 0

    def event(self, ended: bool) -> bytes | None:
        """A server-sent event with what is new; None if nothing is: the scheduler writes a token
        before it notifies, so one notification may announce two.
        """
        start, count = self._count, len(self._request.output_logprobs)
        if not ended and count == start:
            return None
        reply = self._reply(ended, start, count)
        self._count = count
        reply["text"] = self._new_text(ended, count)
        return b"data: " + orjson.dumps(reply) + b"\n\n"

    def reply(self) -> dict[str, Any]:
        """The whole reply, as JSON values."""
        reply = self._reply(True, 0, len(self._request.output_logprobs))
        return {"text": final_text(self._tokenizer, self._request), **reply}

    def _reply(self, ended: bool, start: int, count: int) -> dict[str, Any]:
        """Output tokens `start` to `count`, without their text; the last one has the versions."""
        request = self._request
        spans = request.spans
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish_reason(request) if ended else None,
            "prompt_tokens": len(request.input_ids),
            "weight_version": spans[-1][0] if spans else self._version,
            "num_retractions": request.num_retractions,
            "completion_tokens": count,
            "cached_tokens": request.cached_tokens,
        }
        if ended:
            meta["weight_versions"] = _version_spans(request, self._version)
        if self._body.return_logprob:
            self._add_logprobs(meta, start, count)
        return {"output_ids": request.output_ids[start:count], "meta_info": meta}

    def _new_text(self, ended: bool, count: int) -> str:
        """Text that no event has carried yet."""
        request, sent = self._request, self._sent_text
        if ended:
            return final_text(self._tokenizer, request)[sent:]
        if self._text is None:
            self._text = TextStream(self._tokenizer, request.sampling.skip_special_tokens)
        # A stop token has no text. That it ended the response may not be known yet.
        ends = request.output_ids[count - 1] in request.sampling.stop_token_ids
        new = slice(self._decoded, count - 1 if ends else count)
        self._text.push(request.output_ids[new])
        self._decoded = new.stop
        self._sent_text = max(sent, len(self._text.text) - self._held_back)
        return self._text.text[sent : self._sent_text]

    def _add_logprobs(self, meta: dict[str, Any], start: int, count: int) -> None:
        request, new = self._request, slice(start, count)
        output = zip(request.output_logprobs[new], request.output_ids[new], strict=True)
        meta["input_token_logprobs"] = self._input_logprobs()
        meta["output_token_logprobs"] = [self._entry(*item) for item in output]
        first = [None] if request.score_from is not None else []
        if request.num_top:
            meta["input_top_logprobs"] = first + self._tops(request.input_top)
            meta["output_top_logprobs"] = self._tops(request.output_top[new])
        if request.token_ids:
            meta["input_token_ids_logprobs"] = first + self._chosen(request.input_chosen)
            meta["output_token_ids_logprobs"] = self._chosen(request.output_chosen[new])

    def _input_logprobs(self) -> list[Any]:
        request = self._request
        if request.score_from is None:
            return []
        ids = request.input_ids[request.score_from :]
        if ids and not request.input_logprobs:
            return []  # aborted before it was scored
        first = self._entry(None, request.input_ids[request.score_from - 1])
        rest = zip(request.input_logprobs, ids, strict=True)
        return [first, *(self._entry(*item) for item in rest)]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._tokenizer.decode([token_id]) if self._body.return_text_in_logprobs else None
        return [logprob, token_id, text]

    def _tops(self, rows: list[TopLogprobs]) -> list[Any]:
        return [[self._entry(*item) for item in row] for row in rows]

    def _chosen(self, rows: list[list[float]]) -> list[Any]:
        ids = self._request.token_ids
        return [[self._entry(*item) for item in zip(row, ids, strict=True)] for row in rows]


def _finish_reason(request: EngineRequest) -> dict[str, Any] | None:
    finish = request.finish
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": len(request.output_ids)}
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}


def _version_spans(request: EngineRequest, version: str) -> list[dict[str, Any]]:
    """Half-open spans that cover the response; one empty span if nothing was sampled."""
    spans = request.spans or [(version, 0)]
    ends = [start for _, start in spans[1:]] + [len(request.output_ids)]
    return [
        {"version": label, "start": start, "end": end}
        for (label, start), end in zip(spans, ends, strict=True)
    ]
