"""Spans of a test, kept instead of sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollout_bridge import tracing


class Kept:
    """What was made since the block began."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order of their ends."""
        return list(self.exporter.get_finished_spans())

    def of_turn(self, turn_id: str) -> list[ReadableSpan]:
        """Those of a turn's trace."""
        trace_id, _ = tracing.ids_of(turn_id)
        return [span for span in self.spans if at(span)[0] == trace_id]


def at(span: ReadableSpan) -> tuple[int, int]:
    """Its trace's id and its own."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


@contextmanager
def kept_spans() -> Iterator[Kept]:
    """Tracing is on in this process."""
    kept = Kept()
    with tracing.sending("test", SimpleSpanProcessor(kept.exporter)):
        yield kept


def said(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes."""
    return dict(span.attributes or {})
