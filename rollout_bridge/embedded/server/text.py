"""From sampled ids to text: the text so far, what a stop string cuts, what is trimmed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from rollout_bridge.embedded.scheduling.request import EngineRequest


class TextStream:
    """Text of a growing response, decoded token by token; incomplete characters wait."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._backend = getattr(tokenizer, "_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns all text so far."""
        if self._backend is None:
            self._ids.extend(ids)
            self.text = decode(self._tokenizer, self._ids, self._skip).rstrip("\ufffd")
            return self.text
        for token_id in ids:
            piece = self._stream.step(self._backend, token_id)
            if piece is not None:
                self.text += piece
        return self.text


class StopStrings:
    """Watches one response for the first of its stop strings."""

    def __init__(self, tokenizer: Any, request: EngineRequest):
        self._text = TextStream(tokenizer, request.sampling.skip_special_tokens)
        self._stop = request.sampling.stop
        self._longest = max(map(len, self._stop))
        self._text.push(request.output_ids)

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, if any."""
        before = len(self._text.text)
        text = self._text.push((token_id,))
        tail = text[max(0, before - self._longest + 1) :]
        found = [(tail.find(stop), stop) for stop in self._stop if stop in tail]
        return min(found)[1] if found else None


def decode(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Text of `ids`, exactly as sampled."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def final_text(tokenizer: Any, request: EngineRequest) -> str:
    """Text of a finished response without the stop token or stop string that ended it."""
    ids = request.output_ids
    matched = request.finish.matched if request.finish is not None else None
    if isinstance(matched, int):
        ids = ids[:-1]
    text = decode(tokenizer, ids, request.sampling.skip_special_tokens)
    if isinstance(matched, str) and matched in text:
        text = text[: text.index(matched)]
    return text
