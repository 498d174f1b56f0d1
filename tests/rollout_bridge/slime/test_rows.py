from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from records.types import ReadySample
from rollout_bridge.slime.rows import train_rows
from tests.trainer.tiny import conversation

SHAPE = (3, 2)


def with_experts(sample: ReadySample, fill: int) -> ReadySample:
    rows = len(sample.prompt_ids) + len(sample.response_ids) - 1
    return replace(sample, routed_experts=np.full((rows, *SHAPE), fill, dtype=np.int16))


def test_turns_of_a_conversation_are_one_row() -> None:
    samples = [
        *conversation("a", [(5, 3), (2, 4), (3, 2)], seed=1),
        *conversation("b", [(4, 6)], seed=2),
    ]
    rows = train_rows(samples, [0, 1, 2, 3], min_rows=1)
    assert [len(row.ids) for row in rows] == [19, 10]
    first, second = (row.carrier for row in rows)
    assert [(turn.start, turn.end, turn.version_gap) for turn in first.turns] == [
        (5, 8, 0),
        (10, 14, 1),
        (17, 19, 2),
    ]
    assert (first.prompt_length, first.response_length) == (5, 14)
    assert sum(first.loss_mask()) == 9
    assert [turn.sample.turn_id for turn in second.turns] == ["b-0"]
    assert not any(row.is_padding or row.experts is not None for row in rows)
    for row in rows:
        for turn in row.carrier.turns:
            np.testing.assert_array_equal(row.ids[turn.start : turn.end], turn.sample.response_ids)


@pytest.mark.parametrize("turns", [0, 1])
def test_padding_fills_what_the_layout_needs_and_trains_nothing(turns: int) -> None:
    samples = conversation("a", [(5, 3)], seed=1)[:turns]
    rows = train_rows(samples, [0] * turns, min_rows=4)
    assert [row.is_padding for row in rows] == [False] * turns + [True] * (4 - turns)
    for row in rows[turns:]:
        assert row.ids.tolist() == [0, 0]
        assert row.carrier.loss_mask() == [0]
        assert row.carrier.rollout_logprobs().tolist() == [0.0]
        assert row.carrier.batch.num_rows == turns
        assert len(row.carrier.batch.turns) == turns


def test_micro_batches_are_rounded_up_and_each_has_a_row() -> None:
    samples = [turn for name in "abcde" for turn in conversation(name, [(5, 3)], seed=1)]
    rows = train_rows(samples, [0] * 5, min_rows=4)
    assert [row.is_padding for row in rows] == [False] * 5 + [True] * 3
    assert len(train_rows(samples[:4], [0] * 4, min_rows=4)) == 4


def test_a_step_has_at_least_one_row() -> None:
    assert len(train_rows([], [], min_rows=0)) == 1


def test_experts_are_those_of_each_token_when_it_was_sampled() -> None:
    first, second = conversation("a", [(5, 3), (2, 4)], seed=1)
    samples = [with_experts(first, 1), with_experts(second, 2)]
    [row, padding] = train_rows(samples, [0, 0], min_rows=2, experts_shape=SHAPE)
    assert row.experts is not None
    assert row.experts.dtype == np.int32
    assert row.experts[:, 0, 0].tolist() == [2] * 4 + [1] * 3 + [2] * 6
    assert padding.experts is not None
    assert padding.experts.tolist() == [[[0, 1]] * 3]


def test_experts_that_are_missing_or_of_another_model_are_refused() -> None:
    [sample] = conversation("a", [(5, 3)], seed=1)
    with pytest.raises(ValueError, match=r"turn a-0: .*\(3, 2\).* none are recorded"):
        train_rows([sample], [0], min_rows=1, experts_shape=SHAPE)
    with pytest.raises(ValueError, match=r"\(3, 2\) are recorded"):
        train_rows([with_experts(sample, 1)], [0], min_rows=1, experts_shape=(4, 2))
