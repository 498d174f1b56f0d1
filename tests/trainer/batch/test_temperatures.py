"""Which temperature and which gradient reaches the objective: from samples to its batch.

Advantages and KL are at temperature 1; ratios, rollout correction and what is reported of them are
at each sample's own (ALGORITHMS 1.9).
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout_bridge.merging import PackedSequence, TurnSpan
from tests.trainer.tiny import load, sample
from trainer.batch.collate import MicroBatch, TurnScores, build_micro_batch, score_responses
from trainer.batch.token_batch import Assembled, BatchContext, Correction, assemble
from trainer.batch.views import TurnSupport, TurnView
from trainer.config import TrainerConfig
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.batch import NO_STATISTICS
from trainer.objectives.options import HindsightOpd
from trainer.objectives.rollout_correction.settings import RolloutCorrectionSettings, rejection_rule
from trainer.step.preparation import batch_statistics
from trainer.step.update import Updater

# Log-probs of two tokens by temperature and time; the engine's come last.
NOW, NOW_SAMPLED = (-1.0, -2.0), (-1.5, -1.75)
OLD, OLD_SAMPLED = (-1.25, -2.5), (-1.6, -2.1)
ROLLOUT = (-1.7, -1.9)


def micro_batch() -> MicroBatch:
    """One prompt token, two tokens of a response."""
    sequence = PackedSequence(
        ids=np.arange(3, dtype=np.int32), spans=(TurnSpan(turn=0, start=1, end=3),)
    )
    return build_micro_batch([sequence], temperatures=[0.5])


def placed(values) -> torch.Tensor:
    return torch.tensor([[0.0, *values]], requires_grad=True)


def now() -> TokenLogprobs:
    return TokenLogprobs(
        logprobs_BT=placed(NOW),
        logprobs_sampled_BT=placed(NOW_SAMPLED),
        entropy_BT=placed((1.0, 1.0)),
        support_BTK=placed(NOW).unsqueeze(-1),
    )


def before() -> list[TurnScores]:
    return [TurnScores(logprobs=torch.tensor(OLD), logprobs_sampled=torch.tensor(OLD_SAMPLED))]


def views() -> list[TurnView]:
    ones = torch.ones(2)
    support = TurnSupport(
        ids=torch.zeros(2, 1, dtype=torch.long),
        old=None,
        teacher=torch.zeros(2, 1),
        valid=torch.ones(2, 1),
    )
    return [
        TurnView(
            rollout=torch.tensor(ROLLOUT),
            teacher=torch.tensor((-0.5, -2.2)),
            opd_valid=ones,
            reward_advantage=ones,
            after_tool=ones,
            version_gap=ones,
            support=support,
        )
    ]


def assembled(scores: list[TurnScores] | None, **options) -> Assembled:
    settings = replace(RolloutCorrectionSettings(importance_level="token"), **options)
    context = BatchContext(
        views=views(),
        before=scores,
        correction=Correction(settings),
        whole=None,
        statistics=NO_STATISTICS,
    )
    return assemble(micro_batch(), now(), None, context)


def same(found: torch.Tensor, expected) -> None:
    torch.testing.assert_close(found[0, 1:].detach(), torch.tensor(list(expected)))


def test_each_temperature_has_its_place():
    for scores, old, old_sampled in ((None, NOW, NOW_SAMPLED), (before(), OLD, OLD_SAMPLED)):
        tokens = assembled(scores).tokens
        same(tokens.logprobs_BT, NOW)
        same(tokens.logprobs_sampled_BT, NOW_SAMPLED)
        same(tokens.old_logprobs_BT, old)
        same(tokens.old_logprobs_sampled_BT, old_sampled)
        assert tokens.logprobs_BT.requires_grad
        assert tokens.logprobs_sampled_BT.requires_grad
        assert tokens.support is not None
        assert tokens.support.student_BTK.requires_grad
        for fixed in (tokens.old_logprobs_BT, tokens.old_logprobs_sampled_BT):
            assert not fixed.requires_grad
        assert not tokens.support.old_BTK.requires_grad


@pytest.mark.parametrize(
    ("mode", "compared", "anchor", "weighted"),
    [
        ("decoupled", OLD_SAMPLED, OLD_SAMPLED, True),
        ("bypass", NOW_SAMPLED, ROLLOUT, False),
        ("pure_is", NOW_SAMPLED, OLD_SAMPLED, True),
    ],
)
def test_rollout_correction_is_at_the_sampling_temperature(mode, compared, anchor, weighted):
    """Weights are trainer over engine; all are below the cap of 2."""
    found = assembled(before(), mode=mode)
    ratios = [math.exp(a - b) for a, b in zip(compared, ROLLOUT, strict=True)]
    same(found.compared_BT, compared)
    same(found.tokens.old_logprobs_sampled_BT, anchor)
    same(found.tokens.weights_BT, ratios if weighted else (1.0, 1.0))
    assert not found.tokens.weights_BT.requires_grad
    assert not found.compared_BT.requires_grad


def test_rejected_tokens_leave_the_mask():
    """Of the ratios 1.105 and .819 the second is out."""
    found = assembled(before(), rejections=(rejection_rule("token", 1.2, 0.9),))
    same(found.tokens.mask_BT, (1.0, 0.0))


def test_a_normalisation_over_the_batch_compares_at_the_sampling_temperature():
    settings = RolloutCorrectionSettings(importance_level="token", batch_normalize=True)
    ratios = torch.exp(torch.tensor(OLD_SAMPLED) - torch.tensor(ROLLOUT))
    corrected = Correction(settings).whole_batch(views(), before())
    assert corrected is not None
    torch.testing.assert_close(corrected[0].weights, ratios / ratios.mean())


def test_the_clip_of_m2po_follows_from_ratios_at_the_sampling_temperature():
    """Log-ratios .8 and 1, both pushed up: of their squares' bounds .64 fits a budget of .7."""
    options = HindsightOpd(surrogate="m2po", second_moment_budget=0.7)
    far = replace(views()[0], rollout=torch.tensor(OLD_SAMPLED) - torch.tensor((0.8, 1.0)))
    found = batch_statistics(options, [far], before())
    assert found.clip_low == pytest.approx(1 - math.exp(-0.8), rel=1e-5)
    assert found.clip_high == pytest.approx(math.exp(0.8) - 1, rel=1e-5)


def test_the_start_and_the_teacher_are_scored_at_temperature_1(folder):
    config = TrainerConfig(tensorboard=False, beta_kl=0.1, epochs_per_batch=2)
    one = sample(np.array([1, 2, 3], np.int32), np.array([5, 6], np.int32), temperature=0.5)
    policy, ids = load(folder), torch.tensor([[1, 2, 3, 5, 6]])
    mask = torch.tensor([[0, 0, 0, 1.0, 1.0]])
    expected = policy.token_logprobs(ids, mask, torch.full((1, 5), 0.5))
    updater, found = Updater(policy, load(folder).freeze(), config), {}
    prepared = updater.preparation.prepare([one])
    updater.accumulate(prepared, found)
    prepared = prepared.repeated(found)
    assert prepared.before is not None
    plain, sampled = expected.logprobs_BT.detach(), expected.logprobs_sampled_BT.detach()
    torch.testing.assert_close(prepared.reference[0], plain)
    torch.testing.assert_close(prepared.before[0].logprobs, plain[0, 3:])
    torch.testing.assert_close(prepared.before[0].logprobs_sampled, sampled[0, 3:])
    (score,) = score_responses(
        policy, [one.prompt_ids], [one.response_ids], max_tokens=99, device="cpu"
    )
    torch.testing.assert_close(score.logprobs, plain[0, 3:])
