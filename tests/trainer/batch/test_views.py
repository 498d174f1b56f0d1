"""Who teaches a turn what: engines' stored scores, models in the trainer, several hints."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from records.names import DropReason, SideSource
from records.types import ReadySample, Teaching
from tests.rollout_bridge.separate import separate_turns
from tests.trainer.tiny import VOCAB, load, random_ids, sample, save_model
from trainer.batch.collate import build_micro_batch, score_batches
from trainer.batch.side_sampling import lacks_side_samples, with_side_samples
from trainer.batch.views import TeachingPlan, teach, unteachable
from trainer.objectives.options import (
    ForwardKlTopk,
    HindsightOpd,
    ObjectiveOptions,
    OverlapTopk,
    SelfDistillation,
    SideSampleOptions,
    SparseKl,
)

TOPK = 5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return load(save_model(tmp_path_factory.mktemp("teacher"), seed=7)).freeze()


def turn(seed: int, hints: int = 1, *, scored: bool = True) -> ReadySample:
    generator = np.random.default_rng(seed)
    one = sample(random_ids(generator, 6), random_ids(generator, 4), turn_id=f"t{seed}", seed=seed)
    teachings = tuple(
        Teaching(
            candidate=index,
            hint=f"hint {index}",
            teacher="teacher",
            teacher_version="0",
            hinted_prompt_ids=random_ids(generator, 8 + index),
            teacher_logprobs=one.teacher_logprobs if scored else None,
            topk_ids=np.argsort(generator.random((4, VOCAB)))[:, :TOPK].astype(np.int32),
            topk_logprobs=np.sort(generator.normal(-3, 1, (4, TOPK)).astype(np.float32)),
        )
        for index in range(hints)
    )
    return dataclasses.replace(one, teachings=teachings)


def plan(options: ObjectiveOptions, model=None) -> TeachingPlan:
    return TeachingPlan(
        options=options,
        model=model,
        vocab_size=VOCAB,
        max_tokens=64,
        device="cpu",
        side_source=SideSource.POLICY if options.support == "samples" else None,
    )


def table(model, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """[R, V] log-probs by a plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long().unsqueeze(0)
    with torch.no_grad():
        logits = model.base_model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


def student_scores(folder, samples, **asked):
    return score_batches(load(folder), [build_micro_batch(separate_turns(samples))], **asked)


def test_engine_scores_are_taken_as_they_are():
    samples = [turn(1), turn(2)]
    for one, taught in zip(samples, teach(samples, plan(HindsightOpd()), None), strict=True):
        np.testing.assert_array_equal(taught.logprobs.numpy(), one.teacher_logprobs)
        assert taught.support is None
        assert taught.valid


def test_engine_supports_are_cut_to_the_size_asked_for():
    one = turn(1)
    options = ForwardKlTopk(name="forward_kl_topk", topk=3)
    (taught,) = teach([one], plan(options), None)
    assert taught.support.ids.tolist() == one.teachings[0].topk_ids[:, :3].tolist()
    np.testing.assert_array_equal(
        taught.support.teacher.numpy(), one.teachings[0].topk_logprobs[:, :3]
    )
    too_many = ForwardKlTopk(name="forward_kl_topk", topk=TOPK + 1)
    assert unteachable(one, plan(options)) is None
    assert unteachable(one, plan(too_many)) is DropReason.TEACHER_LOGPROBS_INVALID


def test_a_model_scores_the_hinted_prompt(teacher):
    samples = [turn(1, scored=False), turn(2, scored=False)]
    options = ForwardKlTopk(name="forward_kl_topk", topk=3)
    for one, taught in zip(samples, teach(samples, plan(options, teacher), None), strict=True):
        expected = table(teacher, one.teachings[0].hinted_prompt_ids, one.response_ids)
        response = torch.from_numpy(one.response_ids).long().unsqueeze(-1)
        torch.testing.assert_close(taught.logprobs, expected.gather(-1, response).squeeze(-1))
        values, ids = expected.topk(3, dim=-1)
        assert torch.equal(taught.support.ids, ids)
        torch.testing.assert_close(taught.support.teacher, values)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (SparseKl(name="sparse_kl", topk=3), {"top_k": 3}),
        (SelfDistillation(name="self_distillation", topk=3), {"top_k": 3}),
    ],
)
def test_a_model_scores_the_students_own_tokens(folder, teacher, options, asked):
    samples = [turn(1), turn(2)]
    scores = student_scores(folder, samples, **asked)
    for index, taught in enumerate(teach(samples, plan(options, teacher), scores)):
        one = samples[index]
        own = scores[index].topk_ids
        assert torch.equal(taught.support.ids, own)
        expected = table(teacher, one.teachings[0].hinted_prompt_ids, one.response_ids)
        torch.testing.assert_close(taught.support.teacher, expected.gather(-1, own))
        student = table(load(folder), one.prompt_ids, one.response_ids)
        torch.testing.assert_close(taught.support.old, student.gather(-1, own))


@pytest.mark.parametrize("mode", ["shortest", "token_optimal", "sequence_optimal"])
@pytest.mark.parametrize("subset", ["student", "teacher", "overlap"])
def test_the_hint_whose_teacher_overlaps_most_teaches(folder, teacher, mode, subset):
    samples = [turn(1, hints=3), turn(2, hints=1)]
    options = OverlapTopk(name="overlap_topk", topk=4, hint_choice=mode, subset=subset)
    scores = student_scores(folder, samples, top_k=4)
    first, second = teach(samples, plan(options, teacher), scores)
    tables = torch.stack(
        [
            table(teacher, one.hinted_prompt_ids, samples[0].response_ids)
            for one in samples[0].teachings
        ]
    )
    ids = tables.topk(4, dim=-1).indices
    own = scores[0].topk_ids
    overlap = (own[None, :, :, None] == ids[:, :, None, :]).any(-1).sum(-1)
    if mode == "shortest":
        chosen = torch.zeros(4, dtype=torch.long)
    elif mode == "token_optimal":
        chosen = torch.tensor(
            [int((overlap[:, t] == overlap[:, t].max()).nonzero()[0]) for t in range(4)]
        )
    else:
        chosen = torch.full((4,), int(overlap.sum(-1).argmax()))
    response = torch.from_numpy(samples[0].response_ids).long()
    expected = tables[chosen, torch.arange(4), response]
    torch.testing.assert_close(first.logprobs, expected)
    support_ids = ids[chosen, torch.arange(4)] if subset == "teacher" else own
    assert torch.equal(first.support.ids, support_ids)
    torch.testing.assert_close(
        first.support.teacher, tables[chosen, torch.arange(4)].gather(-1, support_ids)
    )
    if subset == "overlap":
        inside = (own[:, :, None] == ids[chosen, torch.arange(4)][:, None, :]).any(-1)
        assert torch.equal(first.support.valid > 0, inside)
    assert second.candidate == 0


def test_a_turn_without_hint_trains_on_its_reward_alone():
    silent = dataclasses.replace(
        turn(1),
        teachings=(),
        hint="",
        reward=1.0,
        teacher_logprobs=np.full(4, np.nan, np.float32),
    )
    both = plan(HindsightOpd(reward_coef=1.0))
    assert unteachable(silent, both) is None
    (taught,) = teach([silent], both, None)
    assert not taught.valid
    assert bool(taught.logprobs.isnan().all())
    assert unteachable(silent, plan(HindsightOpd())) is DropReason.TEACHER_LOGPROBS_INVALID
    neutral = dataclasses.replace(silent, reward=0.0)
    assert unteachable(neutral, both) is DropReason.NEUTRAL_REWARD
    assert unteachable(neutral, plan(HindsightOpd(opd_coef=0, reward_coef=1))) is (
        DropReason.NEUTRAL_REWARD
    )
    compared = HindsightOpd(reward_coef=1.0, reward_baseline="step")
    assert unteachable(neutral, plan(compared)) is None
    no_reward = dataclasses.replace(silent, reward=None)
    assert unteachable(no_reward, both) is DropReason.TEACHER_LOGPROBS_INVALID


def test_the_whole_vocabulary_is_taken_where_it_is_smaller_than_asked_for(teacher):
    options = ForwardKlTopk(name="forward_kl_topk", topk=10 * VOCAB)
    (taught,) = teach([turn(1)], plan(options, teacher), None)
    assert taught.support.ids.shape == (4, VOCAB)
    torch.testing.assert_close(taught.support.teacher.exp().sum(-1), torch.ones(4))


def test_side_samples_are_drawn_once_and_scored_by_both(folder, teacher):
    policy = load(folder)
    options = plan(SideSampleOptions(name="side_samples", samples=6), teacher)
    samples = [turn(1), turn(2)]
    assert all(lacks_side_samples(one, options) for one in samples)
    drawn = with_side_samples(samples, policy, options)
    assert not any(lacks_side_samples(one, options) for one in drawn)
    for one, taught in zip(drawn, teach(drawn, options, None), strict=True):
        ids = torch.from_numpy(one.side_samples.ids).long()
        assert ids.shape == (4, 6)
        student = table(policy, one.prompt_ids, one.response_ids).gather(-1, ids)
        torch.testing.assert_close(taught.support.old, student)
        hinted = table(teacher, one.teachings[0].hinted_prompt_ids, one.response_ids)
        torch.testing.assert_close(taught.support.teacher, hinted.gather(-1, ids))
        assert torch.equal(taught.support.ids, ids)
        assert one.side_samples.source is SideSource.POLICY
    with pytest.raises(ValueError, match="side samples"):
        teach(samples, options, None)
