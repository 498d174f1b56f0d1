"""OpenTelemetry traces: one for each turn, from the agent's request to the step that trained it.

The trace of a turn follows from its id: its trace id and the id of its first span are a hash. So
each process adds spans to it, and nothing has to be stored or handed on. A request that says which
trace it is part of (the header `traceparent`) gets a span there, which links to the turn's trace. A
step is a trace of its own, linked to its turns.

Spans are made when their work is over: this module is told when it began. Nothing happens unless
one of the standard variables names a collector (`is_wanted`).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Link, Tracer

COLLECTORS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
FLUSH_MS = 5000
"""How long the end of a process waits for spans that were not sent yet."""

Attributes = dict[str, str | int | float | bool]


def is_wanted() -> bool:
    """Whether the environment names a collector of traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return any(os.environ.get(name) for name in COLLECTORS)


def problem() -> str | None:
    """Why traces cannot be sent, though they are wanted."""
    if not is_wanted():
        return None
    for name in PROTOCOLS:
        if os.environ.get(name, HTTP) != HTTP:
            return f"{name}={os.environ[name]}: only {HTTP} is supported"
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp") is None:
        named = next(name for name in COLLECTORS if os.environ.get(name))
        return f"{named} is set, and traces need a package: pip install 'hindsight-opd[traces]'"
    return None


@contextmanager
def sending(process: str, processor: SpanProcessor | None = None) -> Iterator[None]:
    """Send the spans of this process, if that is wanted, until the end of the block. `processor`
    takes them instead of a collector.
    """
    global _tracer
    if processor is None and not is_wanted():
        yield
        return
    provider = _provider(process, processor)
    _tracer = provider.get_tracer("opd")
    try:
        yield
    finally:
        _tracer = None
        provider.force_flush(FLUSH_MS)
        provider.shutdown()


def is_on() -> bool:
    """Whether spans are made."""
    return _tracer is not None


def request_span(
    turn_id: str, began: float, ended: float, attributes: Attributes, traceparent: str | None
) -> None:
    """The first span of a turn's trace; with `traceparent` also one in the trace of the agent.

    Times are unix seconds.
    """
    if _tracer is None:
        return
    links = []
    if traceparent is not None:
        from opentelemetry.trace import Link
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        agents = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        span = _tracer.start_span(
            "chat",
            context=agents,
            attributes=attributes,
            links=[_link(turn_id)],
            start_time=_ns(began),
        )
        span.end(_ns(ended))
        links = [Link(span.get_span_context())]
    with _ids.exactly(turn_id):
        span = _tracer.start_span(
            "chat",
            context=_nothing(),
            attributes=attributes,
            links=links,
            start_time=_ns(began),
        )
    span.end(_ns(ended))


def turn_span(
    turn_id: str, name: str, began: float, attributes: Attributes, ended: float | None = None
) -> None:
    """A later span of a turn's trace; it ends now, unless `ended` says when."""
    if _tracer is None:
        return
    span = _tracer.start_span(
        name, context=_of_turn(turn_id), attributes=attributes, start_time=_ns(began)
    )
    span.end(_ns(time.time() if ended is None else ended))


def step_spans(
    turn_ids: Sequence[str], began: float, parts: Mapping[str, float], attributes: Attributes
) -> None:
    """A step that ends now, with its parts in order (seconds by name), and its span in the trace of
    each turn that it trained.
    """
    if _tracer is None:
        return
    from opentelemetry.trace import Link, set_span_in_context

    step = _tracer.start_span(
        "step",
        context=_nothing(),
        attributes=attributes,
        links=[_link(turn_id) for turn_id in turn_ids],
        start_time=_ns(began),
    )
    inside, at = set_span_in_context(step), began
    for name, seconds in parts.items():
        part = _tracer.start_span(name, context=inside, start_time=_ns(at))
        at += seconds
        part.end(_ns(at))
    ended = _ns(time.time())
    step.end(ended)
    for turn_id in turn_ids:
        trained = _tracer.start_span(
            "step",
            context=_of_turn(turn_id),
            attributes=attributes,
            links=[Link(step.get_span_context())],
            start_time=_ns(began),
        )
        trained.end(ended)


class _TurnIds:
    """Gives out the ids of a turn's first span when asked to, else random ones."""

    def __init__(self) -> None:
        self._exact = threading.local()

    @contextmanager
    def exactly(self, turn_id: str) -> Iterator[None]:
        self._exact.turn_id = turn_id
        try:
            yield
        finally:
            self._exact.turn_id = None

    def generate_trace_id(self) -> int:
        turn_id = getattr(self._exact, "turn_id", None)
        return _number(os.urandom(16)) if turn_id is None else ids_of(turn_id)[0]

    def generate_span_id(self) -> int:
        turn_id = getattr(self._exact, "turn_id", None)
        return _number(os.urandom(8)) if turn_id is None else ids_of(turn_id)[1]

    def is_trace_id_random(self) -> bool:
        return True


_tracer: Tracer | None = None
_ids = _TurnIds()


def ids_of(turn_id: str) -> tuple[int, int]:
    """Trace id (16 bytes) and the id of the first span (8 bytes) of a turn's trace."""
    digest = hashlib.sha256(turn_id.encode()).digest()
    return _number(digest[:16]), _number(digest[16:24])


def _number(digits: bytes) -> int:
    """An id, which must not be 0."""
    return int.from_bytes(digits) or 1


def _provider(process: str, processor: SpanProcessor | None) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    name = os.environ.get("OTEL_SERVICE_NAME", "opd")
    resource = Resource.create({"service.name": name, "opd.process": process})
    provider = TracerProvider(resource=resource, id_generator=_ids)  # type: ignore[arg-type]
    if processor is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(OTLPSpanExporter())
    provider.add_span_processor(processor)
    return provider


def _nothing() -> Context:
    """No span around."""
    from opentelemetry.context import Context

    return Context()


def _of_turn(turn_id: str) -> Context:
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(_link(turn_id).context), _nothing())


def _link(turn_id: str) -> Link:
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    trace_id, span_id = ids_of(turn_id)
    flags = TraceFlags(TraceFlags.SAMPLED)
    return Link(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
