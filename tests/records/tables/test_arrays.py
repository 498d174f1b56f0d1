from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from records.tables.arrays import (
    as_ids,
    checksum,
    halves_from_bytes,
    halves_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
    logprobs_from_bytes,
    logprobs_to_bytes,
    shared_ends,
)

ids = hnp.arrays(np.int32, st.integers(0, 40), elements=st.integers(0, 2**31 - 1))
few_ids = hnp.arrays(np.int32, st.integers(0, 12), elements=st.integers(0, 2))
logprobs = hnp.arrays(
    np.float32,
    st.integers(0, 40),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(ids)
def test_ids_survive_the_round_trip(array: np.ndarray) -> None:
    data = ids_to_bytes(array)
    back = ids_from_bytes(data)
    assert len(data) == 4 * len(array)
    assert back.dtype == np.int32
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


@given(logprobs)
def test_logprobs_survive_bit_by_bit_nan_included(array: np.ndarray) -> None:
    back = logprobs_from_bytes(logprobs_to_bytes(array))
    assert back.dtype == np.float32
    assert back.flags.writeable
    assert back.tobytes() == array.tobytes()


def test_bytes_are_little_endian() -> None:
    assert ids_to_bytes([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert logprobs_to_bytes(np.array([-0.5], ">f4")) == b"\x00\x00\x00\xbf"


@pytest.mark.parametrize("bad", [[1.0], [[1]], [-1], [2**31], ["a"]])
def test_ids_that_are_no_ids_are_refused(bad: list) -> None:
    with pytest.raises(ValueError, match="token ids"):
        as_ids(bad)


@pytest.mark.parametrize("bad", [[[0.5]], [1, 2]])
def test_logprobs_that_are_no_floats_are_refused(bad: list) -> None:
    with pytest.raises(ValueError, match="log-probs"):
        logprobs_to_bytes(bad)


def test_a_partial_element_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        ids_from_bytes(b"\x01\x00\x00")


@given(ids, st.data())
def test_checksum_does_not_depend_on_the_split(array: np.ndarray, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(array)))
    assert checksum(array[:cut], array[cut:]) == checksum(array)


@given(few_ids, few_ids)
def test_shared_ends_rebuild_the_changed_array(original: np.ndarray, changed: np.ndarray) -> None:
    prefix, suffix = shared_ends(original, changed)
    middle = changed[prefix : len(changed) - suffix]
    tail = original[len(original) - suffix :]
    assert prefix + suffix <= min(len(original), len(changed))
    np.testing.assert_array_equal(np.concatenate([original[:prefix], middle, tail]), changed)


@given(st.lists(st.floats(width=32), max_size=20))
def test_halves_keep_three_digits_and_what_is_not_known(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    back = halves_from_bytes(halves_to_bytes(array))
    assert len(halves_to_bytes(array)) == 2 * len(array)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(back), np.isnan(array))
    np.testing.assert_array_equal(np.isinf(back), np.isinf(array))
    finite = np.isfinite(array)
    bounded = np.clip(array[finite], -65504, 65504)
    np.testing.assert_allclose(back[finite], bounded, rtol=5e-4, atol=6e-8)
    with pytest.raises(ValueError, match="floats in one dimension"):
        halves_to_bytes([1, 2])
