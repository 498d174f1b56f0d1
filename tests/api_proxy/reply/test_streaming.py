"""The assembler: whatever the chunks, what is streamed is what an unstreamed reply says."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api_proxy.reply.incremental_text import IncrementalText
from api_proxy.reply.reply import Delta, Reply, SentCall
from api_proxy.reply.streaming import Detokenizer, ReplyAssembler
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import WEATHER
from tests.linear_time import growth

USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REPLIES = [
    "Hello, world!",
    "  \n Hello,\n\n  world!  \n",
    "Grüße aus 東京 🙂🙃 – ok",
    CALL,
    "Let me see. \n" + CALL + "\n" + CALL.replace("Paris", "Rome"),
    "a < b and <tool is not a call",
    "<think>\nhm, <b> \n</think>\n\nHello.",
    "<think>\nonly thinking",
    "<think>\n\n</think>\n\nHello",
    "<think>x</think>\n\n" + CALL,
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>\n' + CALL,
    "Text.\n<tool_call>\nnot json\n</tool_call>",
    '<tool_call>\n{"name": "get_weather", "argum',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "x" <tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "}{\\"", "b": [{}]}, "x": 1}',
    '<tool_call>{"name": "get_weather", "arguments": {}}} </tool_call>',
    '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": 1}"}</tool_call>',
    "",
    "   ",
]


def encode(rendering: Rendering, text: str) -> list[int]:
    return rendering.tokenizer.encode(text, add_special_tokens=False)


def assembler(rendering: Rendering, **options) -> ReplyAssembler:
    return ReplyAssembler(
        Detokenizer(rendering),
        prompt_ids=rendering.prompt_ids(USER, [WEATHER]),
        tools=[WEATHER],
        **options,
    )


def streamed(
    rendering: Rendering, ids: list[int], cuts: list[int], matched: str | None = None, **options
) -> tuple[list[Delta], Reply, ReplyAssembler]:
    stream = assembler(rendering, **options)
    deltas: list[Delta] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        deltas += stream.push(ids[start:end])
    last, reply = stream.finish(ids, matched)
    return deltas + last, reply, stream


def comparable(reply: Reply) -> tuple:
    calls = [(call.name, call.arguments) for call in reply.tool_calls]
    return reply.content, reply.reasoning, calls


def joined_calls(deltas: list[Delta]) -> list[SentCall]:
    """The calls as a client puts them together; pieces of one call come one after the other."""
    calls: list[SentCall] = []
    for piece in (delta.call for delta in deltas if delta.call):
        if piece.id is not None:
            assert piece.index == len(calls)
            assert (piece.name, piece.arguments) != (None, "")
            calls.append(SentCall(id=piece.id, name=piece.name or "", arguments=""))
        else:
            assert (piece.index, piece.name) == (len(calls) - 1, None)
            assert piece.arguments
            arguments = calls[-1].arguments + piece.arguments
            calls[-1] = replace(calls[-1], arguments=arguments)
    return calls


def assert_same(rendering: Rendering, ids: list[int], cuts: list[int], **options) -> None:
    deltas, reply, stream = streamed(rendering, ids, cuts, **options)
    _, whole = assembler(rendering, **options).finish(ids)
    assert not stream.mismatched
    if reply.has_open_call and not whole.has_open_call:
        # Left open by a policy that ended by itself: text, unless some of it was sent as a call.
        *calls, last = reply.tool_calls
        assert reply.reasoning == whole.reasoning
        assert comparable(whole)[2] == comparable(replace(reply, tool_calls=tuple(calls)))[2]
        assert whole.content.startswith(reply.content)
        assert last.name in whole.content
        assert last.arguments in whole.content
    else:
        assert comparable(reply) == comparable(whole)
    assert "".join(delta.content for delta in deltas) == reply.content
    assert "".join(delta.reasoning for delta in deltas) == (reply.reasoning or "")
    assert tuple(joined_calls(deltas)) == reply.tool_calls


@pytest.mark.parametrize("text", REPLIES)
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("allow_calls", [True, False])
def test_token_by_token(rendering: Rendering, text: str, end: bool, allow_calls: bool) -> None:
    ids = encode(rendering, text) + list(rendering.stop_token_ids[:1]) * end
    assert_same(rendering, ids, list(range(1, len(ids))), allow_calls=allow_calls)


@settings(max_examples=150)
@example(pieces=["<think>\nonly thinking", CALL, "<think>\nhm</think>Hello."], seed=0, stop=())
@example(pieces=["<think>\nonly thinking", REPLIES[10], REPLIES[6]], seed=0, stop=())
@example(pieces=["  \n Hello,\n\n  world!  \n", "Grüße aus 東京 🙂🙃 – ok"], seed=5030, stop=())
@given(
    pieces=st.lists(
        st.sampled_from([*REPLIES, " ", "\n", "STOP", "ST", "<", "</think>", "é"]), max_size=5
    ),
    seed=st.integers(0, 2**16),
    stop=st.sampled_from([(), ("STOP",), ("\n\n", "wor")]),
)
def test_any_chunks(
    rendering: Rendering, pieces: list[str], seed: int, stop: tuple[str, ...]
) -> None:
    ids = encode(rendering, "".join(pieces))
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(ids)), rng.randint(0, len(ids) - 1))) if ids else []
    assert_same(rendering, ids, cuts, stop=stop)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 200), max_size=40), seed=st.integers(0, 2**16))
def test_any_ids(rendering: Rendering, ids: list[int], seed: int) -> None:
    assert_same(rendering, ids, list(range(1, len(ids))))


def test_text_comes_as_it_is_sampled(rendering: Rendering) -> None:
    stream = assembler(rendering)
    ids = encode(rendering, "Hello, world! How are you today?")
    sent = ""
    for count, token in enumerate(ids, start=1):
        sent += "".join(delta.content for delta in stream.push([token]))
        said = rendering.decode(ids[:count]).rstrip()
        assert sent == said


def test_a_call_is_sent_as_it_is_sampled(rendering: Rendering) -> None:
    stream = assembler(rendering)
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Par\\u00eds", "n": [1]}}'
    deltas: list[Delta] = []
    ids = encode(rendering, text)
    for count, token in enumerate(ids, start=1):
        deltas += stream.push([token])
        said = rendering.decode(ids[:count])
        _, head, arguments = said.partition('"arguments": ')
        (call,) = joined_calls(deltas) or [None]
        if not head or not arguments:
            assert call is None
            continue
        assert call is not None
        assert call.name == "get_weather"
        # Its own last brace is the block's; whitespace waits for what follows.
        expected = arguments if count < len(ids) else arguments[:-1]
        assert expected.startswith(call.arguments)
        assert len(call.arguments) >= len(expected.removesuffix("}").rstrip())
    pieces = [delta.call for delta in deltas if delta.call]
    assert pieces[0].arguments == ""
    assert len(pieces) > 4
    end, reply = stream.finish([*ids, *encode(rendering, "\n</tool_call>")])
    assert end == []
    assert reply.tool_calls[0].arguments == '{"city":  "Par\\u00eds", "n": [1]}'


def test_a_call_of_another_form_is_sent_when_it_is_complete(rendering: Rendering) -> None:
    stream = assembler(rendering)
    ids = encode(
        rendering, '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "w"}\n</tool_call>'
    )
    assert [delta for token in ids[:-1] for delta in stream.push([token])] == []
    (call,) = joined_calls(stream.push(ids[-1:]))
    assert (call.name, call.arguments) == ("w", '{"city": "Rome"}')


@pytest.mark.parametrize(
    ("text", "stop", "matched", "content"),
    [
        ("Hello STOP", ("STOP",), "STOP", "Hello "),
        ("Hello STOPPED", ("STOP",), "STOP", "Hello "),
        ("Hello foo\n", ("foo\n",), "foo\n", "Hello "),
        ("Hello\n\n", ("\n\n",), "\n\n", "Hello"),
        ("Hello ST", ("STOP",), None, "Hello ST"),
    ],
)
def test_stop_strings(
    rendering: Rendering, text: str, stop: tuple[str, ...], matched: str | None, content: str
) -> None:
    ids = encode(rendering, text)
    cuts = list(range(1, len(ids)))
    deltas, reply, stream = streamed(rendering, ids, cuts, matched, stop=stop)
    _, whole = assembler(rendering, stop=stop).finish(ids, matched)
    assert reply.content == whole.content == content
    assert "".join(delta.content for delta in deltas) == content
    assert not stream.mismatched


def test_forced_ids_open_the_reply_without_being_sampled(rendering: Rendering) -> None:
    forced = encode(rendering, "<tool_call>\n")
    ids = encode(rendering, CALL.removeprefix("<tool_call>\n"))
    deltas, reply, _ = streamed(rendering, ids, list(range(1, len(ids))), forced_ids=forced)
    assert [call.name for call in reply.tool_calls] == ["get_weather"]
    assert tuple(joined_calls(deltas)) == reply.tool_calls


def test_incremental_text_equals_the_decoded_whole(rendering: Rendering) -> None:
    ids = encode(rendering, "Grüße aus 東京 🙂🙃 – ok")
    text = IncrementalText(rendering.decode)
    for token in ids:
        text.push([token])
        assert rendering.decode(ids).startswith(text.text)
    assert text.text == rendering.decode(ids)


@pytest.mark.parametrize(
    "unit",
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "hello ", "\U0001f468"),
        '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>\n',
        '<tool_call>\n{"name": "f", "arguments": {"a": ',
    ],
)
def test_a_reply_of_markers_alone_takes_linear_time(rendering: Rendering, unit: str) -> None:
    ids = rendering.tokenizer.encode(unit, add_special_tokens=False)
    check_growth(rendering, ids)


def test_bytes_that_are_never_a_character_take_linear_time(rendering: Rendering) -> None:
    first, *_ = rendering.tokenizer.encode("\U0001f468", add_special_tokens=False)
    assert rendering.decode([first]) == "\ufffd"
    check_growth(rendering, [first])


def check_growth(rendering: Rendering, ids: list[int]) -> None:
    """A client can ask for any of these, by a grammar or by `logit_bias`."""
    prompt_ids = np.asarray([5], dtype=np.int32)
    detokenizer = Detokenizer(rendering)

    def answer(number: int) -> None:
        assembler = ReplyAssembler(detokenizer, prompt_ids=prompt_ids)
        for token in (ids * number)[:number]:
            assembler.push([token])

    assert growth(lambda: answer(2_000), lambda: answer(8_000), below=6.6) < 6.6
