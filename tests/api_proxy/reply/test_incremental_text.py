"""Text of ids that come in pieces: the same as that of all of them, and no more work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proxy.reply.incremental_text import IncrementalText


def decode(ids: Sequence[int]) -> str:
    """Each id is a byte."""
    return bytes(ids).decode("utf-8", "replace")


def pieces_of(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    return [ids[start : start + length] for start in range(0, len(ids), length)]


@pytest.mark.parametrize("length", range(1, 12))
def test_pieces_that_all_end_within_a_character(length: int) -> None:
    ids = ("a" * 3 + "é東🙂" * 40 + "!").encode()
    text = IncrementalText(decode)
    assert "".join(text.push(piece) for piece in pieces_of(ids, length)) == decode(ids)
    assert text.text == decode(ids)


@given(text=st.text(max_size=60), lengths=st.lists(st.integers(1, 9), min_size=1))
def test_any_pieces_of_any_text(text: str, lengths: list[int]) -> None:
    ids, found, incremental = text.encode(), "", IncrementalText(decode)
    for place in range(len(ids)):
        start = sum(lengths[one % len(lengths)] for one in range(place))
        if start >= len(ids):
            break
        found += incremental.push(ids[start : start + lengths[place % len(lengths)]])
        assert text.startswith(found)
    # A replacement character of the text itself waits for what follows.
    assert found.rstrip("\ufffd") == text.rstrip("\ufffd")


@pytest.mark.parametrize("unit", [b"a", "é".encode(), b"\xff", b"a\xe2", b"\xf0\x9f"])
def test_work_is_linear(unit: bytes) -> None:
    def decoded(count: int) -> int:
        number = 0

        def counted(ids: Sequence[int]) -> str:
            nonlocal number
            number += len(ids)
            return decode(ids)

        text = IncrementalText(counted)
        for piece in pieces_of(unit * count, 2):
            text.push(piece)
        return number

    assert decoded(2000) <= 11 * decoded(200)
