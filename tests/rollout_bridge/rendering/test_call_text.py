"""A call's text in any pieces says what the whole says."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.rendering.call_text import CallReader, read_call

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('{}[]"\\\\ aé\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


@given(
    arguments=OBJECTS,
    indent=st.sampled_from([None, 2]),
    is_ascii=st.booleans(),
    tail=st.sampled_from(["", "}", " }\n", "}} x", '}, "more": {}}']),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    keep=st.integers(0, 400) | st.just(10**6),
)
def test_any_pieces(
    arguments: dict, indent: int | None, is_ascii: bool, tail: str, cuts: list[int], keep: int
) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)
    head = '\n{"name": "look_up",  "arguments":\n'
    block = (head + written + tail)[:keep]
    reader = CallReader()
    places = sorted({cut for cut in cuts if cut < len(block)} | {0, len(block)})
    pieces = [reader.push(block[start:end]) for start, end in pairwise(places)]
    whole = read_call(block)
    if whole is None:
        assert reader.name is None
        assert len(block) <= len(head)
        return
    assert (reader.name, "".join(pieces)) == whole
    assert whole[0] == "look_up"
    assert whole[1] == block[len(head) : len(head) + len(written)].rstrip()


@pytest.mark.parametrize(
    "block",
    [
        "",
        "text",
        '{"name": "a"}',
        '{"name": "a", "arguments": "{}"}',
        '{"name": "a", "arguments": [1]}',
        '{"arguments": {}, "name": "a"}',
        '{"name": "", "arguments": {}}',
        '{"name": "a\\u0062", "arguments": {}}',
    ],
)
def test_blocks_of_another_form(block: str) -> None:
    assert read_call(block) is None


def test_a_long_block_of_another_form_is_not_read_again_for_each_token() -> None:
    reader = CallReader()
    for _ in range(5000):
        assert reader.push("x") == ""
    assert reader.name is None
