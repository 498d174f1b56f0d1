"""Spans of turns and steps: which trace they are part of; and nothing happens unless wanted."""

from __future__ import annotations

import time

import pytest

from rollout_bridge import tracing
from tests.spans import at, kept_spans

AGENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_all_processes_know_the_trace_of_a_turn() -> None:
    with kept_spans() as kept:
        tracing.request_span("turn-1", 10.0, 12.5, {"opd.version": 3}, None)
        tracing.turn_span("turn-1", "judge", 13.0, {"opd.votes": 5}, 14.0)
        tracing.turn_span("turn-2", "judge", 13.0, {}, 14.0)
    first, second = kept.of_turn("turn-1")
    assert (first.name, first.parent, first.attributes) == ("chat", None, {"opd.version": 3})
    assert (first.start_time, first.end_time) == (10_000_000_000, 12_500_000_000)
    assert second.parent is not None
    assert second.parent.span_id == at(first)[1] == tracing.ids_of("turn-1")[1]
    assert first.resource.attributes["opd.process"] == "test"


def test_an_agents_trace_gets_a_span_that_links_to_the_turns() -> None:
    with kept_spans() as kept:
        tracing.request_span("turn-1", 1.0, 2.0, {}, AGENT)
    agents, own = kept.spans
    assert f"{at(agents)[0]:032x}" == AGENT.split("-")[1]
    assert agents.parent is not None
    assert f"{agents.parent.span_id:016x}" == AGENT.split("-")[2]
    assert [link.context.trace_id for link in agents.links] == [tracing.ids_of("turn-1")[0]]
    assert [link.context.span_id for link in own.links] == [at(agents)[1]]
    assert own.parent is None


@pytest.mark.parametrize("header", ["", "00-abc", "x" * 5000, "00-" + "0" * 32 + "-0-01"])
def test_a_header_that_names_no_trace_is_ignored(header: str) -> None:
    with kept_spans() as kept:
        tracing.request_span("turn-1", 1.0, 2.0, {}, header)
    assert all(span.parent is None for span in kept.spans)
    assert len(kept.of_turn("turn-1")) == 1


def test_a_step_links_to_its_turns_and_is_in_their_traces() -> None:
    began = time.time() - 5
    with kept_spans() as kept:
        tracing.step_spans(["a", "b"], began, {"update": 2.0, "publish": 1.0}, {"opd.version": 4})
    step = next(span for span in kept.spans if span.name == "step" and span.parent is None)
    assert {link.context.trace_id for link in step.links} == {
        tracing.ids_of(turn_id)[0] for turn_id in ("a", "b")
    }
    parts = [span for span in kept.spans if span.name in ("update", "publish")]
    assert [span.parent and span.parent.span_id for span in parts] == [at(step)[1]] * 2
    assert parts[0].end_time == parts[1].start_time
    for turn_id in ("a", "b"):
        [trained] = kept.of_turn(turn_id)
        assert trained.attributes == {"opd.version": 4}
        assert [link.context.span_id for link in trained.links] == [at(step)[1]]


def test_nothing_is_made_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.COLLECTORS:
        monkeypatch.delenv(name, raising=False)
    with tracing.sending("test"):
        assert not tracing.is_on()
        tracing.turn_span("turn-1", "judge", 1.0, {})
    monkeypatch.setenv(tracing.COLLECTORS[0], "http://127.0.0.1:9")
    assert tracing.is_wanted()
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not tracing.is_wanted()
            assert tracing.problem() is None


def test_a_protocol_that_is_not_spoken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.COLLECTORS[0], "http://127.0.0.1:9")
    assert tracing.problem() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert tracing.problem() == (
        "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: only http/protobuf is supported"
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.COLLECTORS[1], "http://127.0.0.1:9")
    monkeypatch.setattr(tracing, "find_spec", lambda _: None)
    assert tracing.problem() == (
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, and traces need a package: pip install "
        "'hindsight-opd[traces]'"
    )
