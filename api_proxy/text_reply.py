"""The continuation of a text: sampled ids as text, nothing parsed, nothing stripped."""

from __future__ import annotations

from collections.abc import Sequence

from api_proxy.incremental_text import IncrementalText
from api_proxy.reply import Delta, Reply
from api_proxy.streaming import Detokenizer, held_back


class TextAssembler:
    """One continuation in the making; a stop string and what follows it are not shown."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.mismatched = False
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._text = IncrementalText(detokenizer.decode)
        self._sent = ""

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Add sampled ids; returns what may be sent now."""
        self._text.push(self._until_stop(ids))
        text = self._text.text
        end = self._stop_position(text)
        return self._send(text[:end] if end is not None else held_back(text, self._stop))

    def finish(
        self, response_ids: Sequence[int], matched_stop: str | None = None
    ) -> tuple[list[Delta], Reply]:
        """What is left to send, and the whole continuation. `response_ids` are all ids sampled."""
        text = self._detokenizer.decode(self._until_stop(response_ids))
        text = text[: self._stop_position(text)]
        self.mismatched = not text.startswith(self._sent)
        deltas = self._send(text)
        return deltas, Reply(content=self._sent, reasoning=None, tool_calls=())

    def _until_stop(self, ids: Sequence[int]) -> list[int]:
        stops = self._detokenizer.stop_token_ids
        end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
        return list(ids[:end])

    def _stop_position(self, text: str) -> int | None:
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _send(self, text: str) -> list[Delta]:
        if not text.startswith(self._sent):
            return []
        new = text[len(self._sent) :]
        self._sent = text
        return [Delta(content=new)] if new else []
