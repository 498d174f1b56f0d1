import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.merging import PackedSequence, TurnSpan, merge_turns
from tests.rollout_bridge.separate import separate_turns
from tests.trainer.tiny import conversation, sample
from trainer.batch.collate import build_micro_batch, comparable, plan_micro_batches


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def spans(sequences: list[PackedSequence]) -> list[list[tuple[int, int, int]]]:
    return [[(s.turn, s.start, s.end) for s in sequence.spans] for sequence in sequences]


def test_turns_that_extend_each_other_share_one_sequence():
    samples = conversation("a", [(5, 3), (4, 2), (2, 6)], seed=1)
    sequences = merge_turns(samples)
    assert spans(sequences) == [[(0, 5, 8), (1, 12, 14), (2, 16, 22)]]
    np.testing.assert_array_equal(sequences[0].ids[16:22], samples[2].response_ids)


def test_a_dropped_turn_stays_as_context():
    samples = conversation("a", [(5, 3), (4, 2), (2, 6)], seed=1, skip=[1])
    assert spans(merge_turns(samples)) == [[(0, 5, 8), (1, 16, 22)]]


def test_other_sessions_and_rewritten_histories_are_sequences_of_their_own():
    first = sample(ids(1, 2), ids(3, 4), session_id="a")
    other_session = sample(ids(1, 2, 3, 4, 5), ids(6), session_id="b")
    rewritten = sample(ids(1, 2, 4, 5), ids(6), session_id="a")
    assert len(merge_turns([first, other_session, rewritten])) == 3


def test_siblings_and_duplicates_do_not_merge_into_each_other():
    first = sample(ids(1, 2), ids(3))
    duplicate = sample(ids(1, 2), ids(3))
    sibling = sample(ids(1, 2), ids(4))
    # Two replies to the same continuation of `first`: one joins it, the other stands alone.
    next_a = sample(ids(1, 2, 3, 9), ids(5))
    next_b = sample(ids(1, 2, 3, 9), ids(5))
    sequences = merge_turns([first, duplicate, sibling, next_a, next_b])
    trained = sorted(span.turn for sequence in sequences for span in sequence.spans)
    assert trained == [0, 1, 2, 3, 4]
    assert len(sequences) == 3
    for sequence in sequences:
        turns = {span.turn for span in sequence.spans}
        assert not {3, 4} <= turns
        assert not {0, 1} <= turns


def test_a_reply_that_repeats_an_earlier_one_inside_a_longer_prompt_keeps_its_own_place():
    first = sample(ids(1), ids(1, 1))
    second = sample(ids(1, 1, 1), ids(1, 1))
    assert spans(merge_turns([first, second])) == [[(0, 1, 3), (1, 3, 5)]]


def test_the_longest_fitting_path_is_extended_whatever_the_order():
    samples = conversation("a", [(3, 2), (2, 2), (2, 2)], seed=5)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        assert len(merge_turns([samples[i] for i in order])) == 1


@settings(max_examples=60)
@given(data=st.data())
def test_every_response_token_trains_once_at_its_place(data):
    """Few distinct ids and several sessions, so that accidental prefixes occur."""
    small = st.lists(st.integers(0, 1), min_size=1, max_size=5)
    samples = []
    for index in range(data.draw(st.integers(1, 7))):
        base = samples[data.draw(st.integers(0, index - 1))] if index else None
        prompt = data.draw(small)
        if base is not None and data.draw(st.booleans()):
            prompt = [*base.prompt_ids, *base.response_ids, *prompt]
        session = data.draw(st.sampled_from("ab"))
        samples.append(sample(ids(*prompt), ids(*data.draw(small)), session_id=session, seed=index))
    sequences = merge_turns(samples)
    found = {}
    for sequence in sequences:
        for span in sequence.spans:
            assert span.turn not in found
            found[span.turn] = samples[span.turn]
            one = samples[span.turn]
            np.testing.assert_array_equal(sequence.ids[: span.start], one.prompt_ids)
            np.testing.assert_array_equal(sequence.ids[span.start : span.end], one.response_ids)
    assert len(found) == len(samples)
    for group in plan_micro_batches(sequences, 12):
        batch = build_micro_batch(group)
        check_alignment(batch, samples)


def check_alignment(batch, samples):
    turn_ids, mask = batch.turn_ids_BT.numpy(), batch.mask_BT.numpy()
    assert ((turn_ids >= 0) == (mask == 1)).all()
    teacher = [torch.from_numpy(one.teacher_logprobs) for one in samples]
    spread = batch.spread(teacher, fill=float("nan"))
    pairs = batch.spread([values.unsqueeze(-1).expand(-1, 2) for values in teacher], fill=0.0)
    assert np.isnan(spread.numpy()[mask == 0]).all()
    assert (pairs.numpy()[mask == 0] == 0).all()
    for turn in np.unique(turn_ids[turn_ids >= 0]):
        where = turn_ids == turn
        one = samples[turn]
        np.testing.assert_array_equal(batch.ids_BT.numpy()[where], one.response_ids)
        np.testing.assert_array_equal(spread.numpy()[where], one.teacher_logprobs)
        np.testing.assert_array_equal(pairs.numpy()[where][:, 1], one.teacher_logprobs)
    for turn, values in batch.gather(spread).items():
        assert torch.equal(values, teacher[turn])


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12), budget=st.integers(1, 100))
def test_micro_batches_respect_the_budget_and_lose_nothing(lengths, budget):
    sequences = [
        PackedSequence(ids=np.full(n, i, np.int32), spans=(TurnSpan(turn=i, start=1, end=n),))
        for i, n in enumerate(lengths)
    ]
    groups = plan_micro_batches(sequences, budget)
    seen = sorted(span.turn for group in groups for sequence in group for span in sequence.spans)
    assert seen == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(len(sequence.ids) for sequence in group)
        assert padded <= budget or len(group) == 1


@settings(max_examples=60)
@given(
    common=st.integers(0, 200),
    tails=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    budget=st.integers(1, 600),
)
def test_what_a_group_begins_with_counts_once(common, tails, budget):
    sequences = [
        PackedSequence(
            ids=np.concatenate([np.zeros(common, np.int32), np.full(n, i + 1, np.int32)]),
            spans=(TurnSpan(turn=i, start=common + 1, end=common + n),),
        )
        for i, n in enumerate(tails)
    ]
    groups = plan_micro_batches(sequences, budget, shares=True)
    assert sum(map(len, groups)) == len(tails)
    for group in groups:
        batch = build_micro_batch(group, shares=True)
        longest = max(len(sequence.ids) for sequence in group)
        assert common + len(group) * (longest - common) <= budget or len(group) == 1
        shared = common if common * (len(group) - 1) >= 64 else 0
        assert batch.num_tokens == shared + len(group) * (longest - shared)


def test_turns_of_one_agent_come_together():
    agents = [np.full(80, agent, np.int32) for agent in (1, 2)]
    sequences = [
        PackedSequence(
            ids=np.concatenate([agents[i % 2], np.full(5 + i, 3, np.int32)]),
            spans=(TurnSpan(turn=i, start=81, end=84),),
        )
        for i in range(6)
    ]
    groups = plan_micro_batches(sequences, 160, shares=True)
    assert [{span.turn % 2 for one in group for span in one.spans} for group in groups] == [
        {0},
        {1},
    ]


def test_incomparable_rollouts_have_no_temperature_and_no_logprobs():
    greedy = sample(ids(1), ids(2, 3), temperature=0.0, modified="temperature_0")
    nucleus = sample(ids(1), ids(2, 3), temperature=0.7, modified="top_p")
    assert not comparable(greedy)
    assert comparable(nucleus)
    batch = build_micro_batch(separate_turns([greedy, nucleus]), temperatures=[1.0, 0.7])
    assert batch.temperatures_BT[0].tolist() == [1.0, 1.0, 1.0]
    assert batch.temperatures_BT[1].tolist() == pytest.approx([1.0, 0.7, 0.7])


def test_a_span_outside_its_sequence_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        PackedSequence(ids=ids(1, 2), spans=(TurnSpan(turn=0, start=0, end=1),))
    with pytest.raises(ValueError, match="does not fit"):
        PackedSequence(
            ids=ids(1, 2, 3),
            spans=(TurnSpan(turn=0, start=1, end=3), TurnSpan(turn=1, start=2, end=3)),
        )
