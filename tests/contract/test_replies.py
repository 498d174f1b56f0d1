"""The replies themselves: shapes that the client relies on, and its reading therefore hides."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.wire import error_message

PROMPT = list(range(50, 70))
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True} | fields


async def sent(http: httpx.AsyncClient, **fields: Any) -> Any:
    reply = await http.post("/generate", json=body(**fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


async def streamed(http: httpx.AsyncClient, **fields: Any) -> list[str]:
    """The data of each event; the status is 200 whatever they say."""
    async with http.stream("POST", "/generate", json=body(stream=True, **fields)) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in reply.aiter_lines() if line]
    assert all(line.startswith("data:") for line in lines)
    return [line.removeprefix("data:").strip() for line in lines]


async def test_events_of_a_stream_add_up_to_the_whole(http: httpx.AsyncClient) -> None:
    """Each has what is new, or all so far; the server says which."""
    info = (await http.get("/server_info")).json()
    *data, done = await streamed(http)
    assert done == "[DONE]"
    events = [json.loads(item) for item in data]
    whole = await sent(http)
    ids = whole["output_ids"]
    assert len(ids) == 6
    seen, text = 0, ""
    for event in events:
        meta, start = event["meta_info"], seen
        seen = meta["completion_tokens"]
        if not info["incremental_streaming_output"]:
            start, text = 0, ""
        text += event["text"]
        assert event["output_ids"] == ids[start:seen]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids[start:seen]
        assert whole["text"].startswith(text)
    assert seen == 6
    assert text == whole["text"]
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(set(counts))
    finished = [event["meta_info"]["finish_reason"] is not None for event in events]
    assert finished == [False] * (len(events) - 1) + [True]


async def test_only_the_last_event_has_the_spans(http: httpx.AsyncClient) -> None:
    events = [json.loads(item) for item in (await streamed(http))[:-1]]
    spans = [event["meta_info"].get("weight_versions") for event in events]
    assert spans[:-1] == [None] * (len(events) - 1)
    version = events[-1]["meta_info"]["weight_version"]
    assert spans[-1] == [{"version": version, "start": 0, "end": 6}]


@pytest.mark.parametrize("temperature", [0, 0.5, 2])
async def test_input_logprobs_ignore_the_temperature(
    http: httpx.AsyncClient, reference, temperature: float
) -> None:
    params = {"temperature": temperature, "max_new_tokens": 0}
    reply = await sent(http, sampling_params=params, logprob_start_len=0)
    entries = reply["meta_info"]["input_token_logprobs"]
    rows = reference(PROMPT)
    assert entries[0][:2] == [None, PROMPT[0]]
    for position, (logprob, token, *_) in enumerate(entries[1:], start=1):
        assert token == PROMPT[position]
        assert logprob == pytest.approx(rows[position - 1, token], abs=1e-3)


@pytest.mark.parametrize("start", [0, 1, 7, len(PROMPT) - 1])
async def test_the_first_entry_is_null_wherever_scoring_starts(
    http: httpx.AsyncClient, start: int
) -> None:
    params = {"temperature": 0, "max_new_tokens": 0}
    meta = (await sent(http, sampling_params=params, logprob_start_len=start))["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT[start:]
    assert [entry[0] is None for entry in entries] == [True] + [False] * (len(entries) - 1)
    assert meta["output_token_logprobs"] == []


async def test_several_samples_and_several_prompts_come_as_a_list(http: httpx.AsyncClient) -> None:
    samples = await sent(http, sampling_params={**GREEDY, "n": 3})
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 1
    assert len(samples) == 3
    pair = await sent(http, input_ids=[PROMPT, PROMPT[:9]])
    alone = [await sent(http, input_ids=PROMPT), await sent(http, input_ids=PROMPT[:9])]
    assert [one["output_ids"] for one in pair] == [one["output_ids"] for one in alone]


async def test_unknown_sampling_fields_are_refused_and_other_fields_ignored(
    http: httpx.AsyncClient,
) -> None:
    reply = await http.post("/generate", json=body(sampling_params={**GREEDY, "temperatur": 1}))
    assert reply.status_code == 400
    assert "temperatur" in error_message(reply.json(), "no message")
    assert (await sent(http, no_such_field=1))["output_ids"]


async def test_a_refusal_in_a_stream_is_an_event(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    length = (await client.model_info()).context_length
    assert length is not None
    data = await streamed(http, input_ids=[5] * (length + 20))
    event = json.loads(data[0])
    assert "longer than" in event["error"]["message"]
    assert "output_ids" not in event


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/pause_generation", {"mode": "asleep"}),
        ("/update_weights_from_disk", {"model_path": "no-such-folder-here"}),
        ("/generate", {"input_ids": [], "sampling_params": GREEDY}),
        ("/generate", {"sampling_params": GREEDY}),
    ],
)
async def test_nonsense_is_refused(
    http: httpx.AsyncClient, client: EngineClient, path: str, request_body: dict[str, Any]
) -> None:
    before = await client.model_info()
    assert (await http.post(path, json=request_body)).status_code == 400
    assert await client.model_info() == before
    assert len((await sent(http))["output_ids"]) == 6
