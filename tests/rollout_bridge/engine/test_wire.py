"""Replies of engines: SGLang's as recorded, and everything that must not be believed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.engine import wire
from rollout_bridge.engine.errors import EngineProtocolError, EngineRejected
from rollout_bridge.engine.types import Generation, SamplingParams, WeightSpan
from tests.linear_time import growth

RECORDED = Path(__file__).parents[1] / "sglang_replies"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


def stream_events() -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in recorded("gen_stream")["sse_lines"]]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_sglangs_generation_is_read() -> None:
    generation = wire.read_generation(recorded("gen_stop_token")["json"], 5)
    assert generation.output_ids.tolist() == [230, 80]
    assert (generation.finish_reason, generation.matched) == ("stop", 80)
    assert generation.weight_spans == (WeightSpan(version="v0", start=0, end=2),)
    assert generation.cached_tokens == 4
    assert generation.output_logprobs[1] == pytest.approx(-2.1678647994995117)


def test_several_generations_are_as_many_as_asked_for() -> None:
    reply = recorded("gen_stop_token")["json"]
    assert len(wire.read_generations(reply, 5, 1)) == 1
    found = wire.read_generations([reply, reply], 5, 2)
    assert [one.output_ids.tolist() for one in found] == [[230, 80]] * 2
    for wrong, number in ((reply, 2), ([reply], 2), ([reply] * 3, 2), ([reply], 1)):
        with pytest.raises(EngineProtocolError):
            wire.read_generations(wrong, 5, number)


def test_sglangs_scores_are_read() -> None:
    reply = recorded("gen_max0")
    ids = reply["request"]["input_ids"]
    scores = wire.read_score(reply["json"], ids, 1)
    np.testing.assert_allclose(scores, [-5.3537846, -7.0726681, -8.0058270, -7.8198442], atol=1e-6)
    ids_RK, logprobs_RK = wire.read_score_topk(recorded("gen_logprob")["json"], ids, 1, 2)
    assert ids_RK.tolist() == [[47, 401], [311, 155], [120, 59], [287, 69]]
    assert logprobs_RK[0, 1] == pytest.approx(-3.0724847)


def test_sglangs_stream_is_read_as_new_tokens() -> None:
    reader = wire.StreamReader(5)
    chunks = [reader.read([orjson.dumps(event)]) for event in stream_events()]
    assert [chunk.new_ids for chunk in chunks] == [(230,), (80,), (6,)]
    assert chunks[-1].final is not None
    assert chunks[-1].final.finish_reason == "length"
    assert reader.finished


def incremental() -> list[dict[str, Any]]:
    """The recorded stream as SGLang sends it with --incremental-streaming-output."""
    events, seen, text = [], 0, ""
    for event in stream_events():
        meta = event["meta_info"]
        new = {"output_ids": event["output_ids"][seen:], "text": event["text"][len(text) :]}
        logprobs = {"output_token_logprobs": meta["output_token_logprobs"][seen:]}
        events.append(event | new | {"meta_info": meta | logprobs})
        seen, text = meta["completion_tokens"], event["text"]
    return events


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_streams_of_both_kinds_give_the_same_however_their_events_arrive(at_once: int) -> None:
    found = []
    for events in (stream_events(), incremental()):
        reader, data = wire.StreamReader(5), [orjson.dumps(event) for event in events]
        arrivals = [data[start : start + at_once] for start in range(0, len(data), at_once)]
        chunks = [reader.read(arrived) for arrived in arrivals]
        assert [token for chunk in chunks for token in chunk.new_ids] == [230, 80, 6]
        assert reader.finished
        final = chunks[-1].final
        assert final is not None
        found.append((final.output_ids.tolist(), final.output_logprobs.tolist(), final.text))
    assert found[0] == found[1]
    assert found[0][2]


def test_a_stream_that_lost_an_event_is_refused() -> None:
    events = [orjson.dumps(event) for event in incremental()]
    reader = wire.StreamReader(5)
    reader.read(events[:1])
    with pytest.raises(EngineProtocolError, match="1 tokens after 1, and counts 3"):
        reader.read(events[2:])


def test_a_stream_does_not_change_its_kind() -> None:
    reader = wire.StreamReader(5)
    reader.read([orjson.dumps(event) for event in incremental()[:2]])
    with pytest.raises(EngineProtocolError, match="or back"):
        reader.read([orjson.dumps(stream_events()[2])])


@pytest.mark.parametrize("unsent", [0, 1])
def test_of_what_it_breaks_off_sglang_names_the_last_id_beside_all_logprobs(unsent: int) -> None:
    """Behind tokens that it had not sent yet, if there are some."""
    events, aborted = incremental(), stream_events()[2]
    first, late = events[: 2 - unsent], events[2 - unsent : 2]
    aborted["output_ids"] = [token for event in late for token in event["output_ids"]] + [6]
    meta = aborted["meta_info"]
    meta["finish_reason"] = {"type": "abort", "message": "gone"}
    meta["output_token_logprobs"] = [
        entry for event in late for entry in event["meta_info"]["output_token_logprobs"]
    ] + meta["output_token_logprobs"]
    reader = wire.StreamReader(5)
    reader.read([orjson.dumps(event) for event in first])
    final = reader.read([orjson.dumps(aborted)]).final
    assert final is not None
    assert (final.finish_reason, final.output_ids.tolist()) == ("abort", [230, 80, 6])
    assert final.text == aborted["text"]


def test_a_token_costs_the_same_at_the_end_of_a_long_stream() -> None:
    def events(count: int) -> list[bytes]:
        entry = {"output_token_logprobs": [[-0.5, 7, None]], "prompt_tokens": 5}
        return [
            orjson.dumps(
                {
                    "output_ids": [7],
                    "text": "a",
                    "meta_info": entry | {"finish_reason": None, "completion_tokens": number + 1},
                }
            )
            for number in range(count)
        ]

    def reading(data: list[bytes]) -> Callable[[], None]:
        def read() -> None:
            reader = wire.StreamReader(5)
            for event in data:
                reader.read([event])

        return read

    few, many = reading(events(1000)), reading(events(16_000))
    assert growth(few, many, below=16 * 1.2) < 16 * 1.2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("err_unknown_sampling", "unknown field `nope`"),
        ("err_ctx_generate", "longer than the model's context length"),
        ("err_bad_temp", "non-negative finite number"),
        ("err_empty_ids", "cannot be empty"),
    ],
)
def test_sglangs_error_messages_are_found(name: str, message: str) -> None:
    assert message in wire.error_message(recorded(name)["json"], "none")


def damaged(change) -> dict[str, Any]:
    reply = copy.deepcopy(recorded("gen_stop_token")["json"])
    change(reply, reply["meta_info"])
    return reply


@pytest.mark.parametrize(
    "change",
    [
        lambda reply, meta: reply.pop("meta_info"),
        lambda reply, meta: reply.pop("output_ids"),
        lambda reply, meta: reply["output_ids"].append(1),
        lambda reply, meta: reply["output_ids"].reverse(),
        lambda reply, meta: meta["output_token_logprobs"].pop(),
        lambda reply, meta: meta["output_token_logprobs"][0].__setitem__(0, None),
        lambda reply, meta: meta["output_token_logprobs"][0].__setitem__(0, float("nan")),
        lambda reply, meta: meta["output_token_logprobs"].__setitem__(0, None),
        lambda reply, meta: meta.update(finish_reason=None),
        lambda reply, meta: meta.update(finish_reason={"type": "tired"}),
        lambda reply, meta: meta.update(prompt_tokens=6),
        lambda reply, meta: meta["weight_versions"][0].update(end=1),
        lambda reply, meta: meta["weight_versions"][0].update(start=1),
        lambda reply, meta: meta["weight_versions"][0].pop("version"),
    ],
)
def test_a_damaged_generation_is_refused(change) -> None:
    with pytest.raises(EngineProtocolError):
        wire.read_generation(damaged(change), 5)


def test_missing_spans_are_unknown_not_wrong() -> None:
    reply = damaged(lambda reply, meta: meta.pop("weight_versions"))
    assert wire.read_generation(reply, 5).weight_spans is None


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.pop(),
        lambda entries: entries.append([-1.0, 3, None]),
        lambda entries: entries[0].__setitem__(0, -0.5),
        lambda entries: entries[0].__setitem__(1, 11),
        lambda entries: entries[2].__setitem__(0, None),
        lambda entries: entries[2].__setitem__(0, float("inf")),
        lambda entries: entries[2].__setitem__(0, True),
        lambda entries: entries[4].__setitem__(1, 51),
        lambda entries: entries.__setitem__(3, None),
    ],
)
def test_damaged_scores_are_refused(change) -> None:
    reply = recorded("gen_max0")
    change(reply["json"]["meta_info"]["input_token_logprobs"])
    with pytest.raises(EngineProtocolError):
        wire.read_score(reply["json"], reply["request"]["input_ids"], 1)


def test_sglang_names_the_last_id_as_0() -> None:
    reply, ids = recorded("gen_max0")["json"], recorded("gen_max0")["request"]["input_ids"]
    entry = reply["meta_info"]["input_token_logprobs"][2]
    entry[1] = 0
    expected = wire.read_score(recorded("gen_max0")["json"], ids, 1)
    last = ids[2]
    np.testing.assert_array_equal(wire.read_score(reply, ids, 1, last + 1), expected)
    for vocab_size in (None, last + 2, last):
        with pytest.raises(EngineProtocolError, match="scored"):
            wire.read_score(reply, ids, 1, vocab_size)


def test_a_stream_whose_past_changes_is_refused() -> None:
    events = stream_events()
    events[1]["output_ids"][0] = 7
    events[1]["meta_info"]["output_token_logprobs"][0][1] = 7
    reader = wire.StreamReader(5)
    reader.read([orjson.dumps(events[0])])
    with pytest.raises(EngineProtocolError, match="changed"):
        reader.read([orjson.dumps(events[1])])


def test_an_error_event_is_a_refusal() -> None:
    event = {"error": {"message": "The input is longer", "code": 400}}
    with pytest.raises(EngineRejected, match="longer") as refused:
        wire.StreamReader(5).read([orjson.dumps(event)])
    assert refused.value.status == 400


@given(st.lists(st.integers(-3, 12), max_size=6), st.integers(1, 10))
def test_only_ids_of_the_vocabulary_leave(ids: list[int], vocab_size: int) -> None:
    if ids and all(0 <= token < vocab_size for token in ids):
        assert wire.checked_ids(np.array(ids, dtype=np.int32), vocab_size) == ids
    else:
        with pytest.raises(ValueError, match="input id"):
            wire.checked_ids(ids, vocab_size)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_spans_must_cover_the_response(lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    spans = tuple(
        WeightSpan(version=str(number), start=end - length, end=end)
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    )
    total = ends[-1]

    def make(count: int) -> Generation:
        return Generation(
            output_ids=np.zeros(count, np.int32),
            output_logprobs=np.zeros(count, np.float32),
            text="",
            finish_reason="length",
            matched=None,
            weight_version="0",
            weight_spans=spans,
            prompt_tokens=1,
            cached_tokens=0,
        )

    assert make(total).weight_spans == spans
    with pytest.raises(ValueError, match="spans cover"):
        make(total + 1)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7}, None),
        ({"temperature": 0}, "temperature_0"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 0.5}, "penalty"),
        ({"frequency_penalty": -0.5}, "penalty"),
        ({"top_p": 0.9, "presence_penalty": 0.5}, "penalty"),
        ({"top_k": 5, "min_p": 0.1, "frequency_penalty": 0.5}, "penalty"),
        ({"temperature": 0, "presence_penalty": 0.5}, "temperature_0"),
    ],
)
def test_a_changed_distribution_is_named(params: dict[str, Any], reason: str | None) -> None:
    assert SamplingParams(**params).distribution_modified() == reason
