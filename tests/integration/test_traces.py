"""An endpoint that is told of a collector sends it the traces of its turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from records.store import Store
from rollout_bridge import tracing
from tests.integration.test_stop_signal import configured, proxy_process, scripted_engine
from tests.records.looking import list_turns

AGENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ExportTraceServiceRequest]]:
    """What it was sent; processes that start now know its address."""
    taken: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield taken
        server.shutdown()


async def test_a_turn_is_traced_in_the_agents_trace_and_its_own(
    collector: list[ExportTraceServiceRequest], tmp_path: Path
) -> None:
    async with scripted_engine() as engine:
        port = free_ports(1)[0]
        config = configured(tmp_path, engine)
        proxy = config.proxy.model_copy(update={"port": port})
        config = config.model_copy(update={"proxy": proxy})
        run_config.save(config, tmp_path / "config.toml")
        url = f"http://127.0.0.1:{port}"
        async with proxy_process(tmp_path, url) as process:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
                await client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "hi"}],
                    extra_headers={"traceparent": AGENT},
                )
            process.terminate()
            assert await process.wait() == 0
    async with await Store.open(config.store) as store:
        [listed] = await list_turns(store)
        turn = await store.turn(listed.turn_id)
        assert turn is not None
    resources = [one for request in collector for one in request.resource_spans]
    said = {one.key: one.value.string_value for one in resources[0].resource.attributes}
    assert (said["service.name"], said["opd.process"]) == ("opd", "proxy")
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    trace_id, span_id = tracing.ids_of(turn.turn_id)
    own = {span.name: span for span in spans if int.from_bytes(span.trace_id) == trace_id}
    assert own.keys() == {"chat", "record"}
    assert int.from_bytes(own["chat"].span_id) == int.from_bytes(own["record"].parent_span_id)
    assert int.from_bytes(own["chat"].span_id) == span_id
    [agents] = [span for span in spans if span.trace_id.hex() == AGENT.split("-")[1]]
    assert agents.parent_span_id.hex() == AGENT.split("-")[2]
    numbers = {one.key: one.value.int_value for one in own["chat"].attributes}
    assert numbers["gen_ai.usage.output_tokens"] == len(turn.response_ids)
    assert b"sun and rain" not in b"".join(one.SerializeToString() for one in collector)
