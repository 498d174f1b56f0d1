import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.scoring.alignment import AlignmentError, locate_span

FREE = -1


def arrays(pattern, stored):
    fresh = np.asarray(pattern, dtype=np.int32)
    return fresh, fresh == FREE, np.asarray(stored, dtype=np.int32)


def no_tail(tail):
    return len(tail) == 0


def brute_force(pattern, stored, span):
    """Every start of the span in `stored`, by trying each place of each run of fixed ids."""
    runs, current = [], []
    for position, token in enumerate([*pattern, FREE]):
        if token != FREE:
            current.append(position)
        elif current:
            runs.append((current[0], current[-1] + 1))
            current = []
    pieces = [pattern[low:high] for low, high in runs]
    target = next(i for i, (low, high) in enumerate(runs) if low <= span[0] and span[1] <= high)
    alignments = [[]]
    for index, piece in enumerate(pieces):
        longer = []
        for starts in alignments:
            low = starts[-1] + len(pieces[index - 1]) if starts else 0
            for start in range(low, len(stored) - len(piece) + 1):
                if index == 0 and start != 0:
                    continue
                if index == len(pieces) - 1 and start + len(piece) != len(stored):
                    continue
                if stored[start : start + len(piece)] == piece:
                    longer.append([*starts, start])
        alignments = longer
    return {starts[target] + span[0] - runs[target][0] for starts in alignments}


@st.composite
def cases(draw):
    tokens = st.integers(0, 2)
    runs = draw(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4))
    pattern = list(runs[0])
    for run in runs[1:]:
        pattern += [FREE, *run]
    stored = list(runs[0])
    for run in runs[1:]:
        stored += [*draw(st.lists(tokens, max_size=3)), *run]
    if draw(st.booleans()):
        stored = draw(st.lists(tokens, max_size=8))
    edges = [i for i, token in enumerate(pattern) if token != FREE]
    start = draw(st.sampled_from(edges))
    end = start + 1
    while end < len(pattern) and pattern[end] != FREE and draw(st.booleans()):
        end += 1
    return pattern, stored, (start, end)


@settings(max_examples=400)
@given(cases())
def test_a_span_is_located_exactly_when_one_place_is_possible(case):
    pattern, stored, span = case
    places = brute_force(pattern, stored, span)
    fresh, free, stored_ids = arrays(pattern, stored)
    if len(places) == 1:
        assert locate_span(fresh, free, stored_ids, span, no_tail) == places.pop()
    else:
        with pytest.raises(AlignmentError):
            locate_span(fresh, free, stored_ids, span, no_tail)


def test_a_tail_is_allowed_where_it_is_accepted():
    fresh, free, stored = arrays([1, 2, FREE, 3], [1, 2, 9, 9, 3, 7])
    assert locate_span(fresh, free, stored, (3, 4), lambda tail: tail.tolist() == [7]) == 4
    assert locate_span(fresh, free, stored, (1, 2), lambda tail: tail.tolist() == [7]) == 1
    with pytest.raises(AlignmentError):
        locate_span(fresh, free, stored, (1, 2), no_tail)


def test_bytes_of_two_ids_are_not_mistaken_for_one():
    shifted = 0x01000000
    fresh, free, stored = arrays([5, FREE, 1, FREE, 6], [5, shifted, 0, 1, 6])
    assert locate_span(fresh, free, stored, (2, 3), no_tail) == 3
