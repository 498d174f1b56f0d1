"""A pass-through in front of an engine that keeps what went over the wire.

It is the witness of what the engine was really asked and really answered: it parses the raw bodies
itself and uses none of the project's code.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web


@dataclass
class Exchange:
    """One /generate call: ids in, ids and log-probs out, as the engine wrote them."""

    request: dict[str, Any]
    reply: dict[str, Any]

    @property
    def input_ids(self) -> list[int]:
        return self.request["input_ids"]

    @property
    def output_ids(self) -> list[int]:
        return self.reply["output_ids"]

    @property
    def output_logprobs(self) -> list[float]:
        return [entry[0] for entry in self.reply["meta_info"]["output_token_logprobs"]]


@dataclass
class EngineTap:
    """Serves on a free port and forwards everything to `engine_url`; an async context manager."""

    engine_url: str
    exchanges: list[Exchange] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> "EngineTap":
        self._session = ClientSession(timeout=ClientTimeout(total=120))
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with self._session.request(
            request.method,
            self.engine_url + request.path,
            data=body,
            headers={"Content-Type": "application/json"},
        ) as upstream:
            headers = {"Content-Type": upstream.headers["Content-Type"]}
            response = web.StreamResponse(status=upstream.status, headers=headers)
            await response.prepare(request)
            seen = b""
            async for data in upstream.content.iter_any():
                seen += data
                await response.write(data)
        if request.path == "/generate":
            self.exchanges.append(Exchange(json.loads(body), _reply(seen)))
        await response.write_eof()
        return response


def _reply(body: bytes) -> dict[str, Any]:
    """The whole reply: the body, or what the events of the embedded engine's stream add up to."""
    if not body.startswith(b"data:"):
        return json.loads(body)
    events = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    parts = [json.loads(event) for event in events if event != b"[DONE]"]
    whole = parts[-1]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        if name in whole["meta_info"]:
            whole["meta_info"][name] = [one for part in parts for one in part["meta_info"][name]]
    whole["output_ids"] = [token for part in parts for token in part["output_ids"]]
    whole["text"] = "".join(part["text"] for part in parts)
    return whole
