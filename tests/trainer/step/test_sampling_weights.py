"""Engine and age corrected apart: what the weights that sampled a turn say of it."""

import dataclasses

import numpy as np
import pytest
import torch

from records.names import DropReason, SideSource, TurnState
from records.queue.side_samples import load_side_samples
from records.types import SideSamples, VersionSpan
from rollout_bridge.engine.errors import EngineLogprobError, EngineProtocolError, EngineRejected
from rollout_bridge.scoring.teachers import FrozenTeacher
from tests.trainer.batch.test_views import table
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import BATCH, opened, samples
from tests.trainer.tiny import VOCAB, load, make_ready, save_model, states
from trainer.batch.views import TurnView
from trainer.calibration.calibrate import own_logprobs
from trainer.config import LoraConfig, TrainerConfig
from trainer.objectives.policy.decoupled import composed_weights
from trainer.objectives.policy.ppo import ppo_clip

APART = {
    "objective": {"surrogate": "decoupled", "engine_cap": 1.5, "importance_cap": 3.0},
    "correction": {"importance_level": "none"},
    "learning_rate": 1e-2,
}
LORA = LoraConfig(rank=2, alpha=4)


def views_of(trainer, batch, gap: int) -> list[TurnView]:
    return trainer.updater.preparation.prepare(batch, [gap] * len(batch)).views


def said(trainer, batch) -> list[np.ndarray]:
    """The log-probs of each response by the policy as it is."""
    own = own_logprobs(trainer.updater.policy, "cpu")
    return [
        own(np.concatenate([one.prompt_ids, one.response_ids]))[-len(one.response_ids) :]
        for one in batch
    ]


@pytest.mark.parametrize("lora", [None, LORA])
async def test_each_version_is_asked_about_its_own_turns(folder, tmp_path, lora):
    async with opened(tmp_path, folder, lora=lora, **APART) as (trainer, store, _):
        asked = samples(2, first=50)
        by_version = [said(trainer, asked)]
        for number in range(2):
            await make_ready(store, samples(BATCH // 2, first=number * BATCH))
            assert await trainer.step() is not None
            by_version.append(said(trainer, asked))
        before = {n: p.detach().clone() for n, p in trainer.updater.policy.model.named_parameters()}
        for version in (0, 1):
            spans = (VersionSpan(version=version, start=0, end=len(asked[0].response_ids)),)
            batch = [
                dataclasses.replace(
                    one,
                    version_spans=(dataclasses.replace(spans[0], end=len(one.response_ids)),),
                )
                for one in asked
            ]
            for view, expected in zip(
                views_of(trainer, batch, 2 - version), by_version[version], strict=True
            ):
                np.testing.assert_allclose(view.sampling, expected, atol=2e-5)
                assert np.abs(view.sampling.numpy() - by_version[2][0][:1]).max() > 1e-4
        # Half a response by one version, half by another.
        one = asked[0]
        spans = (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=3))
        [view] = views_of(trainer, [dataclasses.replace(one, version_spans=spans)], 2)
        expected = np.concatenate([by_version[0][0][:1], by_version[1][0][1:]])
        np.testing.assert_allclose(view.sampling, expected, atol=2e-5)
        # Without a gap it is the policy before the step.
        for view, expected in zip(views_of(trainer, asked, 0), by_version[2], strict=True):
            np.testing.assert_allclose(view.sampling, expected, atol=2e-5)
        after = dict(trainer.updater.policy.model.named_parameters())
        assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_step_weighs_by_both(folder, tmp_path):
    async with opened(tmp_path, folder, **APART) as (trainer, store, _):
        await make_ready(store, samples(BATCH // 2))
        await trainer.step()
        stale = samples(BATCH // 2, first=BATCH)
        prepared = trainer.updater.preparation.prepare(stale, [1] * BATCH)
        total = trainer.updater.accumulate(prepared)
        expected = []
        for view, before in zip(prepared.views, prepared.before, strict=True):
            weights = composed_weights(
                view.rollout,
                view.sampling,
                before.logprobs_sampled,
                engine_cap=1.5,
                staleness_cap=3.0,
            )
            assert (weights - 1).abs().max() > 0.05
            terms = ppo_clip(
                before.logprobs_sampled,
                before.logprobs_sampled,
                view.teacher - before.logprobs,
                clip_low=0.2,
                clip_high=0.28,
                weights=weights,
            )
            expected.append(float(terms.loss.mean()))
        assert total.reduced["pg_loss"] == pytest.approx(np.mean(expected), abs=1e-5)


SIDE = {"name": "side_samples", "samples": 400}
CACHE = {"name": "sparse_kl", "topk": 5}


@pytest.mark.parametrize("lora", [None, LORA])
async def test_side_samples_are_drawn_by_the_weights_that_sampled(folder, tmp_path, lora):
    """So the step's ratio is that of the learner to them, and 1 for fresh turns alone."""
    teaching = LocalEngine(str(save_model(tmp_path / "teacher", seed=7)))
    options = {"learning_rate": 3e-2, "lora": lora, "objective": SIDE, "teaching": teaching}
    async with opened(tmp_path / "run", folder, **options) as (trainer, store, _):
        ratios = []
        for number in range(3):
            await make_ready(store, samples(BATCH // 2, first=number * BATCH))
            report = await trainer.step()
            assert report is not None
            ratios.append(report.metrics["opd/side_ratio_max"])
        assert ratios[0] == pytest.approx(1.0, abs=1e-4)
        assert min(ratios[1:]) > 1.02
        # What was drawn is what the start says, however far the policy went.
        start = load(folder)
        turns = samples(BATCH // 2, first=2 * BATCH)
        kept = await store.read(load_side_samples, turn_ids=[one.turn_id for one in turns])
        for one in turns:
            side = kept[one.turn_id]
            assert side.source is SideSource.POLICY
            rows = table(start, one.prompt_ids, one.response_ids)
            expected = rows.gather(-1, torch.from_numpy(side.ids).long())
            np.testing.assert_allclose(side.rollout_logprobs, expected, atol=2e-5)
            # Drawn from it, too: frequencies of the first position.
            counts = np.bincount(side.ids[0], minlength=VOCAB) / side.ids.shape[1]
            assert np.abs(counts - rows[0].exp().numpy()).max() < 0.1


@pytest.mark.parametrize(("objective", "source"), [(SIDE, "policy"), (CACHE, "policy_top")])
async def test_an_engine_that_teaches_scores_them(folder, tmp_path, objective, source):
    other = LocalEngine(str(save_model(tmp_path / "teacher", seed=7)))
    run = tmp_path / "run"
    async with opened(run, folder, objective=objective, teaching=other) as (trainer, store, _):
        await make_ready(store, samples(BATCH // 2))
        other.fail["score_tokens"] = 10
        assert await trainer.step() is None
        assert await states(store) == {TurnState.READY: BATCH}, "the batch waits"
        other.fail.clear()
        report = await trainer.step()
        assert report is not None
        assert report.version == 1
        await make_ready(store, samples(BATCH // 2, first=BATCH))
        assert await trainer.step() is not None
        kept = await store.read(load_side_samples, turn_ids=["s0-0", f"s{BATCH}-1"])
        everything = {one.turn_id: one for one in samples(2 * BATCH)}
        for turn_id, side in kept.items():
            one = everything[turn_id]
            assert side.source == source
            ids = torch.from_numpy(side.ids).long()
            rows = table(load(folder), one.prompt_ids, one.response_ids)
            np.testing.assert_allclose(side.rollout_logprobs, rows.gather(-1, ids), atol=2e-5)
            if source == "policy_top":
                expected = rows.topk(5, dim=-1).indices
                assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)
            assert np.isfinite(side.teacher_logprobs).all()


async def test_each_turns_own_teacher_scores_them(folder, tmp_path):
    folders = {name: save_model(tmp_path / name, seed=len(name)) for name in ("one", "three")}
    teaching = {name: LocalEngine(str(path)) for name, path in folders.items()}
    run = tmp_path / "run"
    async with opened(run, folder, objective=CACHE, teaching=teaching) as (trainer, store, _):
        for place, name in enumerate(("gone", *folders)):
            await make_ready(store, samples(BATCH // 4, first=place), teacher=name)
        assert await trainer.step() is None
        assert await store.drops() == {DropReason.UNKNOWN_TEACHER: BATCH // 2}
        report = await trainer.step()
        assert report is not None
        assert await states(store) == {
            TurnState.TRAINED: BATCH,
            TurnState.DROPPED: BATCH // 2,
        }
        for place, (name, path) in enumerate(folders.items(), start=1):
            turns = samples(BATCH // 4, first=place)
            kept = await store.read(load_side_samples, turn_ids=[one.turn_id for one in turns])
            for one in turns:
                side = kept[one.turn_id]
                rows = table(load(path), one.prompt_ids, one.response_ids)
                expected = rows.gather(-1, torch.from_numpy(side.ids).long())
                np.testing.assert_allclose(side.teacher_logprobs, expected, atol=2e-5, err_msg=name)


REFUSALS = [
    (ValueError("input id 63 is outside the vocabulary of 60"), DropReason.FOREIGN_TOKENS),
    (EngineRejected(400, "token id 63: valid range is [0, 60)"), DropReason.FOREIGN_TOKENS),
    (EngineLogprobError("null"), DropReason.TEACHER_LOGPROBS_INVALID),
    (EngineProtocolError("log-probs of other ids"), DropReason.TEACHER_MISALIGNED),
]


@pytest.mark.parametrize(("refusal", "reason"), REFUSALS)
async def test_a_turn_that_the_engine_cannot_score_is_dropped_and_the_rest_trains(
    folder, tmp_path, refusal, reason
):
    refused: list[str] = []

    class Smaller(LocalEngine):
        async def score_tokens(self, input_ids, start, token_ids, *, routing_key):
            refused.append(routing_key)
            if routing_key == refused[0]:
                raise refusal
            return await super().score_tokens(input_ids, start, token_ids, routing_key=routing_key)

    teacher = FrozenTeacher("small", Smaller(str(save_model(tmp_path / "teacher", seed=7))))
    run = tmp_path / "run"
    async with opened(run, folder, objective=SIDE, teaching=teacher) as (trainer, store, _):
        await make_ready(store, samples(BATCH // 2 + 1))
        assert await trainer.step() is None
        assert await store.drops() == {reason: 2}
        assert await states(store) == {TurnState.READY: BATCH, TurnState.DROPPED: 2}
        report = await trainer.step()
        assert report is not None
        assert report.version == 1
        assert await states(store) == {TurnState.TRAINED: BATCH, TurnState.DROPPED: 2}


async def test_stored_ids_that_the_policy_does_not_have_drop_their_turn(folder, tmp_path):
    other = LocalEngine(str(save_model(tmp_path / "teacher", seed=7)))
    run = tmp_path / "run"
    async with opened(run, folder, objective=CACHE, teaching=other) as (trainer, store, _):
        turns = samples(BATCH // 2 + 1)
        await make_ready(store, turns)
        shape = (len(turns[0].response_ids), 5)
        ids = np.zeros(shape, dtype=np.int32)
        ids[-1, -1] = VOCAB
        scores = np.full(shape, -2.0, dtype=np.float32)
        stored = SideSamples(
            ids=ids,
            rollout_logprobs=scores,
            teacher_logprobs=scores,
            policy_version=0,
            source=SideSource.POLICY_TOP,
        )
        await store.save_side_samples(turns[0].turn_id, stored)
        assert await trainer.step() is None
        assert await store.drops() == {DropReason.FOREIGN_TOKENS: 1}
        report = await trainer.step()
        assert report is not None
        assert report.version == 1


async def test_a_turn_whose_weights_are_gone_is_dropped(folder, tmp_path):
    async with opened(tmp_path, folder, **APART) as (trainer, store, _):
        await make_ready(store, samples(BATCH // 2, version=7))
        assert await trainer.step() is None
        assert await store.drops() == {DropReason.SAMPLING_WEIGHTS_GONE: BATCH}
        [one, *_] = samples(1)
        assert trainer.updater.unusable(one) is None
        gap = (VersionSpan(version=0, start=1, end=len(one.response_ids)),)
        uncovered = dataclasses.replace(one, version_spans=gap)
        assert trainer.updater.unusable(uncovered) is DropReason.SAMPLING_WEIGHTS_GONE


def test_the_weights_are_kept_for_as_long_as_a_turn_may_ask_them():
    assert TrainerConfig(**APART).versions_kept == 5
    assert TrainerConfig(**APART, keep_checkpoints=8).versions_kept == 8
    assert TrainerConfig(keep_checkpoints=2).versions_kept == 2
    with pytest.raises(ValueError, match="engine_cap has no meaning with surrogate ppo"):
        TrainerConfig(objective={"engine_cap": 2.0})
