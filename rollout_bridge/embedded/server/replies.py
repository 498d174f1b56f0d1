"""Replies of /generate, in SGLang's shape.

Events of a stream are cumulative; their JSON is grown, not rebuilt, so that a token costs the
same at the end of a long response as at its beginning (copying bytes aside).
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
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._count = 0

    def event(self, ended: bool) -> bytes | None:
        """A server-sent event with everything so far; None where the one before had all of it: the
        scheduler writes a token before it calls, so that one call may tell of two.
        """
        count = len(self._request.output_logprobs)
        if not ended and count == self._count:
            return None
        if ended or self._body.top_logprobs_num or self._body.token_ids_logprob:
            return b"data: " + orjson.dumps(self._reply(ended, count)) + b"\n\n"
        self._grow(count)
        assert self._text is not None
        meta = (
            b'{"id":%b,"finish_reason":null,"prompt_tokens":%d,"weight_version":%b,'
            b'"completion_tokens":%d,"cached_tokens":%d'
            % (
                orjson.dumps(self._request.rid),
                len(self._request.input_ids),
                orjson.dumps(self._request.spans[-1][0] if self._count else self._version),
                self._count,
                self._request.cached_tokens,
            )
        )
        if self._body.return_logprob:
            meta += b',"input_token_logprobs":%b,"output_token_logprobs":[%b]' % (
                orjson.dumps(self._input_logprobs()),
                self._logprobs,
            )
        return b'data: {"text":%b,"output_ids":[%b],"meta_info":%b}}\n\n' % (
            orjson.dumps(self._text.text),
            self._ids,
            meta,
        )

    def reply(self) -> dict[str, Any]:
        """The whole reply, as JSON values."""
        return self._reply(True, len(self._request.output_logprobs))

    def _reply(self, ended: bool, count: int) -> dict[str, Any]:
        """The first `count` tokens; the last reply has text and versions to the end."""
        request = self._request
        versions = _version_spans(request, self._version)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish_reason(request) if ended else None,
            "prompt_tokens": len(request.input_ids),
            "weight_version": versions[-1]["version"],
            "num_retractions": request.num_retractions,
            "completion_tokens": count,
            "cached_tokens": request.cached_tokens,
        }
        if ended:
            meta["weight_versions"] = versions
        if self._body.return_logprob:
            self._add_logprobs(meta, count)
        text = final_text(self._tokenizer, request) if ended else self._grow(count)
        return {"text": text, "output_ids": request.output_ids[:count], "meta_info": meta}

    def _add_logprobs(self, meta: dict[str, Any], count: int) -> None:
        request = self._request
        output = zip(request.output_logprobs[:count], request.output_ids[:count], strict=True)
        meta["input_token_logprobs"] = self._input_logprobs()
        meta["output_token_logprobs"] = [self._entry(*item) for item in output]
        first = [None] if request.score_from is not None else []
        if request.num_top:
            meta["input_top_logprobs"] = first + self._tops(request.input_top)
            meta["output_top_logprobs"] = self._tops(request.output_top[:count])
        if request.token_ids:
            meta["input_token_ids_logprobs"] = first + self._chosen(request.input_chosen)
            meta["output_token_ids_logprobs"] = self._chosen(request.output_chosen[:count])

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

    def _grow(self, count: int) -> str:
        """Take in the tokens up to `count`; returns the text so far."""
        request = self._request
        if self._text is None:
            self._text = TextStream(self._tokenizer, request.sampling.skip_special_tokens)
        ids = request.output_ids[self._count : count]
        if not ids:
            return self._text.text
        logprobs = request.output_logprobs[self._count : count]
        separator = b"," if self._count else b""
        self._ids += separator + orjson.dumps(ids)[1:-1]
        entries = [self._entry(*item) for item in zip(logprobs, ids, strict=True)]
        self._logprobs += separator + orjson.dumps(entries)[1:-1]
        self._count = count
        return self._text.push(ids)


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
    """Half-open spans that cover the response; one empty span where nothing was sampled."""
    spans = request.spans or [(version, 0)]
    ends = [start for _, start in spans[1:]] + [len(request.output_ids)]
    return [
        {"version": label, "start": start, "end": end}
        for (label, start), end in zip(spans, ends, strict=True)
    ]
