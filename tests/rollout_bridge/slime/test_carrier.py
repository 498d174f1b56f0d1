"""What travels with a row: masks, places of turns, routed experts; and rows that do not fit."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from records.types import (
    NO_HISTORY,
    UNKNOWN_OUTCOME,
    PastAnswer,
    PastSession,
    PromptHistory,
    ReadySample,
    SessionOutcome,
)
from rollout_bridge.merging import PackedSequence, TurnSpan, merge_turns
from rollout_bridge.slime.carrier import build, row_experts
from tests.rollout_bridge.separate import separate_turns
from tests.trainer.tiny import conversation


@pytest.fixture
def samples() -> list[ReadySample]:
    return conversation("a", [(5, 3), (4, 2), (2, 4)], seed=1, skip=(1,))


def test_a_merged_row_says_where_its_turns_stand(samples):
    (carrier,) = build(samples, merge_turns(samples), [2, 0])
    assert [(turn.start, turn.end, turn.version_gap) for turn in carrier.turns] == [
        (5, 8, 2),
        (16, 20, 0),
    ]
    assert (carrier.prompt_length, carrier.response_length) == (5, 15)
    assert carrier.loss_mask() == [1] * 3 + [0] * 8 + [1] * 4
    values = carrier.rollout_logprobs()
    np.testing.assert_array_equal(values[:3], samples[0].rollout_logprobs)
    np.testing.assert_array_equal(values[11:], samples[1].rollout_logprobs)
    assert (values[3:11] == 0).all()
    batch = carrier.batch
    assert (batch.num_rows, batch.num_tokens, batch.num_taught) == (1, 7, 2)


def test_rows_of_one_batch_share_its_facts_also_in_another_process(samples):
    carriers = build(samples, separate_turns(samples), [0, 0])
    copies = pickle.loads(pickle.dumps(carriers))
    assert copies[0].batch is copies[1].batch
    assert copies[0].batch == carriers[0].batch
    keys = [facts.prompt_key for facts in carriers[0].batch.turns]
    assert keys[0] != keys[1]


def test_a_row_without_turns_is_masked(samples):
    padding = PackedSequence(ids=np.zeros(2, dtype=np.int32), spans=())
    carriers = build(samples, [*merge_turns(samples), padding], [0, 0])
    assert carriers[1].loss_mask() == [0]
    assert carriers[1].rollout_logprobs().tolist() == [0.0]
    assert carriers[1].batch.num_rows == 1


def test_rows_that_do_not_hold_the_samples(samples):
    rows = separate_turns(samples)
    with pytest.raises(ValueError, match="must occur once"):
        build(samples, rows[:1], [0, 0])
    with pytest.raises(ValueError, match="with one gap"):
        build(samples, rows, [0])
    wrong = PackedSequence(ids=rows[0].ids, spans=(TurnSpan(turn=0, start=1, end=4),))
    with pytest.raises(ValueError, match="are not its response"):
        build(samples, [wrong, rows[1]], [0, 0])


def test_tokens_go_the_way_they_went_when_they_were_sampled(samples):
    routed = [
        replace(
            one,
            routed_experts=np.full(
                (len(one.prompt_ids) + len(one.response_ids) - 1, 2, 3), place + 1, dtype=np.int16
            ),
        )
        for place, one in enumerate(samples)
    ]
    (row,) = merge_turns(routed)
    experts = row_experts(routed, row)
    assert experts is not None
    assert experts.shape == (19, 2, 3)
    # Entry t is of token t, which t + 1 was sampled after: tokens 5 to 7 are the first turn's.
    assert experts[:, 0, 0].tolist() == [2] * 4 + [1] * 3 + [2] * 12
    assert (routed[1].routed_experts == 2).all()
    assert row_experts([routed[0], samples[1]], row) is None
    other = replace(routed[0], routed_experts=np.ones((7, 2, 4), dtype=np.int16))
    with pytest.raises(ValueError, match="one model serves a row"):
        row_experts([other, routed[1]], row)


def test_what_turns_are_compared_by_travels_once_and_prompts_of_two_scopes_are_two(samples):
    past = PastAnswer(turn_id="before", version=1, reward=1.0, length=3)
    first = replace(
        samples[0],
        scope="a",
        is_cut=True,
        history=PromptHistory(recent=(past,), first=(past,)),
        session=SessionOutcome(
            outcome=1.0,
            start="task",
            past=(PastSession(session_id="earlier", version=1, outcome=0.0),),
        ),
    )
    other = replace(samples[0], turn_id="other", scope="b")
    batch = [first, other]
    carriers = build(batch, separate_turns(batch), [0, 0])
    facts = carriers[0].batch
    assert facts.turns[0].history == first.history
    assert [one.is_cut for one in facts.turns] == [True, False]
    assert facts.turns[0].prompt_key != facts.turns[1].prompt_key
    assert carriers[0].turns[0].sample.history == NO_HISTORY
    assert facts.turns[0].session == first.session
    assert facts.turns[0].session_id == first.session_id
    assert carriers[0].turns[0].sample.session == UNKNOWN_OUTCOME
    assert facts.without_histories().turns[0] == replace(
        facts.turns[0], history=NO_HISTORY, session=SessionOutcome(outcome=1.0, start="task")
    )
