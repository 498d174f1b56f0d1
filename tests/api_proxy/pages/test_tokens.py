"""An answer token by token: texts of ids, signals, colours, and what a hint changes of a prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proxy.pages.tokens import Signal, coloured, hinted_part, strengths, token_texts

BYTES = "a né日😀".encode()


def decode(ids: list[int]) -> str:
    """A token is a byte."""
    return bytes(ids).decode(errors="replace")


def signal(*values: float | None, nearest: float = 0.0) -> Signal:
    return Signal(name="s", title="S", says="", values=list(values), nearest=nearest)


def test_ids_that_share_a_character_have_it_once() -> None:
    ids = np.frombuffer(BYTES, dtype=np.uint8).astype(np.int32)
    texts = token_texts(ids, decode)
    assert len(texts) == len(ids)
    assert texts == ["a", " ", "n", "é", "", "日", "", "", "😀", "", "", ""]
    broken = np.array([0xE6, 0x61, 0xC3], dtype=np.int32)
    assert token_texts(broken, decode) == ["\ufffd", "a", "\ufffd"]


@given(st.text(max_size=30))
def test_the_texts_are_the_answer(text: str) -> None:
    ids = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)
    assert "".join(token_texts(ids, decode)) == decode(ids.tolist())


def test_a_colour_is_as_strong_as_its_number_is_large() -> None:
    assert strengths(signal(-2.0, -1.0, 0.0, 1.0, 2.0, None)) == [-4, -2, 0, 2, 4, None]
    assert strengths(signal(0.0, 0.0)) == [0, 0]
    assert strengths(signal(3.0, 4.0, nearest=3.0)) == [0, 4]
    assert strengths(signal(None)) == [None]
    assert signal(None).scale is None
    outlier = signal(*[0.1] * 99, 50.0)
    assert outlier.scale == pytest.approx(0.1)
    assert strengths(outlier)[0] == 4
    rare = signal(*[1.0] * 99, 0.0, nearest=1.0)
    assert (rare.scale, strengths(rare)[-1]) == (1.0, -4)


def test_the_legend_has_the_sides_that_occur() -> None:
    def colours(*values: float | None, nearest: float = 0.0) -> list[str]:
        return [colour for colour, _ in signal(*values, nearest=nearest).legend]

    assert colours(-1.0, -2.0) == ["sm4", "sm2", "sp0"]
    assert colours(1.0, 2.0) == ["sp0", "sp2", "sp4"]
    assert colours(0.5, 2.0, None, nearest=1.0) == ["sm4", "sm2", "sp0", "sp2", "sp4", "no"]
    assert colours(None) == []
    assert signal(0.0, 1.0, nearest=1.0).legend[0] == ("sm4", "0.02 and below")
    assert signal(3.0, None).legend[-1] == ("no", "not known (1)")


def test_a_token_tells_its_numbers_and_stays_text() -> None:
    shown = coloured(["<b>", ""], [7, 8], [signal(0.25, None)], signal(0.25, None))
    assert "<b>" not in shown
    assert 'class="t sp4" title="Token 1, id 7. S: 0.2500">&lt;b&gt;</span>' in shown
    assert 'class="t no" title="Token 2, id 8. S: not known">·</span>' in shown


ids = st.lists(st.integers(0, 2), max_size=8)


@given(ids, ids, ids, ids)
def test_what_a_hint_changes_is_found(
    before: list[int], old: list[int], new: list[int], behind: list[int]
) -> None:
    prompt = np.array([*before, *old, *behind], dtype=np.int32)
    hinted = np.array([*before, *new, *behind], dtype=np.int32)
    first, last = hinted_part(prompt, hinted)
    assert first >= len(before) or first == min(len(prompt), len(hinted))
    assert first + last <= min(len(prompt), len(hinted))
    assert prompt[:first].tolist() == hinted[:first].tolist()
    assert prompt[len(prompt) - last :].tolist() == hinted[len(hinted) - last :].tolist()
    assert first + last >= len(before) + len(behind)
