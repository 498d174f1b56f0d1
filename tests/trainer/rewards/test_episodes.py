import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.episodes import episode_ends, sentence_starts


def test_an_episode_begins_with_a_marker_at_the_start_of_a_sentence():
    pieces = ["It", " is", " 4", ".", " Wait", ",", " but", " no", ".\n", "\n", "So", " 5", "."]
    assert episode_ends(pieces) == [4, 10, 13]
    assert sentence_starts(pieces) == [0, 4, 10]


def test_a_marker_is_a_whole_word_and_may_span_tokens():
    assert episode_ends(["Fine", ".", " So", "me", " say", "."]) == [6]
    assert episode_ends(["Fine", ".", " Let", " me", " see", "."]) == [2, 6]


def test_numbers_do_not_end_sentences_and_wide_full_stops_do():
    assert sentence_starts(["3", ".", "14", " is", " pi", "."]) == [0]
    assert sentence_starts(["对", "。", "等等"]) == [0, 2]


def test_long_episodes_are_cut_at_sentences_or_at_the_limit():
    assert episode_ends(["a", ".", " b", " c", ".", " d", "."], max_tokens=4) == [2, 5, 7]
    assert episode_ends(["a"] * 5, max_tokens=2) == [2, 4, 5]
    with pytest.raises(ValueError, match="max_tokens"):
        episode_ends(["a"], max_tokens=0)


@given(
    st.lists(st.sampled_from(["a", " so", ".", "\n", " ", "Wait", "!", ""]), max_size=40),
    st.integers(1, 9),
)
def test_episodes_cover_every_token_within_the_limit(pieces, max_tokens):
    ends = [0, *episode_ends(pieces, max_tokens=max_tokens)]
    assert ends[-1] == len(pieces)
    assert all(0 < b - a <= max_tokens for a, b in itertools.pairwise(ends))
