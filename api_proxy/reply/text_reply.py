"""The continuation of a text: sampled ids as text, nothing parsed, nothing stripped."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from api_proxy.reply.incremental_text import IncrementalText
from api_proxy.reply.reply import Delta, Reply
from api_proxy.reply.streaming import Detokenizer, held_back


class TextAssembler:
    """One continuation in the making; a stop string and what follows it are not shown."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.mismatched = False
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._text = IncrementalText(detokenizer.decode)
        self._sent = StringIO()
        self._pending = ""
        self._is_stopped = False

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Add sampled ids; returns what may be sent now. What may be the beginning of a stop string
        is held back.
        """
        if self._is_stopped:
            return []
        pending = self._pending + self._text.push(self._until_stop(ids))
        end = self._stop_position(pending)
        self._is_stopped = end is not None
        new = pending[:end] if self._is_stopped else held_back(pending, self._stop)
        self._pending = pending[len(new) :]
        return self._send(new)

    def finish(
        self, response_ids: Sequence[int], matched_stop: str | None = None
    ) -> tuple[list[Delta], Reply]:
        """What is left to send, and the whole continuation. `response_ids` are all ids sampled."""
        text = self._detokenizer.decode(self._until_stop(response_ids))
        text = text[: self._stop_position(text)]
        sent = self._sent.getvalue()
        self.mismatched = not text.startswith(sent)
        deltas = [] if self.mismatched else self._send(text[len(sent) :])
        return deltas, Reply(content=self._sent.getvalue(), reasoning=None, tool_calls=())

    def _until_stop(self, ids: Sequence[int]) -> list[int]:
        stops = self._detokenizer.stop_token_ids
        end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
        return list(ids[:end])

    def _stop_position(self, text: str) -> int | None:
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _send(self, new: str) -> list[Delta]:
        self._sent.write(new)
        return [Delta(content=new)] if new else []
