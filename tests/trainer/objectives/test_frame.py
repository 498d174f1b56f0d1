"""The loss as a whole: the worked numbers of ALGORITHMS 2.3, coefficients, the KL's own ratio."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.objectives.every_objective import OBJECTIVES, random_batch
from trainer.objectives.batch import BatchStatistics, TokenBatch
from trainer.objectives.frame import LossSettings, objective_loss
from trainer.objectives.options import ForwardKlTopk, HindsightOpd, SupervisedOpd


def worked_batch() -> TokenBatch:
    """Two tokens of one turn."""

    def row(*values: float) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    now, old = row(-0.2, -1.3), row(-0.5, -1.0)
    ones = row(1.0, 1.0)
    return TokenBatch(
        logprobs_BT=now,
        logprobs_sampled_BT=now,
        old_logprobs_BT=old,
        old_logprobs_sampled_BT=old,
        reference_logprobs_BT=row(-0.4, -1.2),
        teacher_logprobs_BT=row(-0.2, -2.0),
        rollout_logprobs_BT=row(-0.6, -1.0),
        entropy_BT=row(0.5, 1.5),
        mask_BT=ones,
        turn_ids_BT=torch.zeros(1, 2, dtype=torch.long),
        opd_valid_BT=ones,
        reward_advantages_BT=row(0.0, 0.0),
        weights_BT=ones,
        version_gap_BT=row(0.0, 0.0),
        statistics=BatchStatistics(),
    )


def test_worked_numbers():
    result = objective_loss(worked_batch(), HindsightOpd(), LossSettings(beta_kl=0.02))
    torch.testing.assert_close(
        result.advantages_BT, torch.tensor([[0.3, -1.0]], dtype=torch.float64)
    )
    assert float(result.distillation_loss) == pytest.approx((-0.384 + 0.8) / 2)
    assert float(result.reduced["kl_loss"]) == pytest.approx((0.018731 + 0.005171) / 2, abs=1e-6)
    assert float(result.loss) == pytest.approx(0.208239, abs=1e-6)
    assert float(result.reduced["train_rollout_logprob_abs_diff"]) == pytest.approx(0.05)
    assert float(result.reduced["entropy_loss"]) == pytest.approx(1.0)


def test_k2_is_added_where_the_teacher_acts_and_rewards_act_everywhere():
    """The worked example of ALGORITHMS 7.2; the third token is beyond the horizon."""

    def row(*values: float) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    now, ones = row(-1.0, -3.0, -2.0), row(1.0, 1.0, 1.0)
    batch = replace(
        worked_batch(),
        logprobs_BT=now,
        logprobs_sampled_BT=now,
        old_logprobs_BT=now,
        old_logprobs_sampled_BT=now,
        reference_logprobs_BT=None,
        teacher_logprobs_BT=row(-3.0, -2.0, -9.0),
        rollout_logprobs_BT=now,
        entropy_BT=ones,
        mask_BT=ones,
        turn_ids_BT=torch.zeros(1, 3, dtype=torch.long),
        opd_valid_BT=row(1.0, 1.0, 0.0),
        reward_advantages_BT=-ones,
        weights_BT=ones,
        version_gap_BT=0 * ones,
    )
    options = SupervisedOpd(
        name="supervised_opd", opd_coef=0.1, reward_coef=1.0, pass_rate_threshold=0.5, horizon=2
    )
    result = objective_loss(batch, options, LossSettings(beta_kl=0.0))
    assert float(result.loss) == pytest.approx((1.2 + 1.05 + 1.0) / 3)
    assert float(result.reduced["reward_pg_loss"]) == pytest.approx(1.0)
    assert options.kd_coef == 0.1


def test_the_entropy_bonus_lowers_the_loss():
    plain = objective_loss(worked_batch(), HindsightOpd(), LossSettings(beta_kl=0.0))
    bonus = objective_loss(
        worked_batch(), HindsightOpd(), LossSettings(beta_kl=0.0, beta_entropy=0.1)
    )
    assert float(bonus.loss) == pytest.approx(float(plain.loss) - 0.1)


def test_an_emphasis_multiplies_what_the_teacher_teaches_and_nothing_else():
    batch = worked_batch()
    emphasis_BT = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    settings = LossSettings(beta_kl=0.02)
    plain = objective_loss(batch, HindsightOpd(), settings)
    strong = objective_loss(replace(batch, emphasis_BT=emphasis_BT), HindsightOpd(), settings)
    assert float(strong.distillation_loss) == pytest.approx((3 * -0.384 + 0.8) / 2)
    assert float(strong.reduced["kl_loss"]) == float(plain.reduced["kl_loss"])
    assert float(strong.loss - plain.loss) == pytest.approx(2 * -0.384 / 2)
    torch.testing.assert_close(strong.advantages_BT, plain.advantages_BT)


def test_the_reward_adds_its_own_part():
    batch = replace(
        worked_batch(), reward_advantages_BT=torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    )
    result = objective_loss(batch, HindsightOpd(opd_coef=0.5, reward_coef=2.0), LossSettings())
    torch.testing.assert_close(
        result.advantages_BT, torch.tensor([[2.15, 1.5]], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("options", "gap", "weights", "share"),
    [
        # lo over mu is exp(0.1) and exp(2.5), which is above the cap of 5.
        ({"surrogate": "decoupled"}, 0.0, (1.105171, 0.0), 0.5),
        ({"surrogate": "a3po"}, 0.0, (1.491825, 0.0), 1.0),
        ({"surrogate": "a3po"}, 1.0, (1.0, 1.0), 1.0),
        ({"surrogate": "decoupled", "engine_cap": 2.0}, 0.0, (1.105171, 2.442806), 0.5),
    ],
)
def test_weights_are_reported_as_the_surrogate_applied_them(options, gap, weights, share):
    def row(*values: float) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    batch = replace(
        worked_batch(),
        rollout_logprobs_BT=row(-0.6, -3.5),
        sampling_logprobs_BT=row(-0.5, -1.2),
        version_gap_BT=row(gap, gap),
    )
    found = objective_loss(batch, HindsightOpd(**options), LossSettings()).reduced
    assert float(found["tis"]) == pytest.approx(sum(weights) / 2, abs=1e-6)
    assert float(found["tis_clipfrac"]) == share
    plain = objective_loss(batch, HindsightOpd(), LossSettings()).reduced
    assert float(plain["tis"]) == 1.0
    assert float(found["tis_abs"]) == float(plain["tis_abs"])


@pytest.mark.parametrize(
    ("kind", "factors"), [("unbiased", (1.349859, 0.740818)), ("clipped", (1.28, 0.740818))]
)
def test_a_kl_over_epochs_has_a_ratio_of_its_own(kind, factors):
    settings = LossSettings(beta_kl=1.0, kl_type="k2", kl_ratio=kind)
    result = objective_loss(worked_batch(), HindsightOpd(), settings)
    expected = (factors[0] * 0.02 + factors[1] * 0.005) / 2
    assert float(result.reduced["kl_loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_kls_clip_is_the_objectives():
    settings = LossSettings(beta_kl=1.0, kl_type="k2", kl_ratio="clipped")
    narrow = HindsightOpd(clip_low=0.1, clip_high=0.1)
    result = objective_loss(worked_batch(), narrow, settings)
    # The smaller of both: a ratio below the clip stands.
    expected = (1.1 * 0.02 + 0.740818 * 0.005) / 2
    assert float(result.reduced["kl_loss"]) == pytest.approx(expected, rel=1e-5)


def test_rewards_beside_a_divergence_are_a_ppo_term():
    batch = random_batch(1)
    with_rewards, without = OBJECTIVES["overlap_with_rewards"], OBJECTIVES["overlap_topk"]
    settings = LossSettings(beta_kl=0.0)
    one = objective_loss(batch, with_rewards, settings)
    other = objective_loss(batch, without, settings)
    added = 0.5 * float(one.reduced["reward_pg_loss"])
    assert float(one.loss) == pytest.approx(float(other.loss) + added)
    assert added != 0.0


def test_what_is_missing_is_named():
    batch = replace(worked_batch(), reference_logprobs_BT=None)
    with pytest.raises(ValueError, match="reference"):
        objective_loss(batch, HindsightOpd(), LossSettings(beta_kl=0.1))
    with pytest.raises(ValueError, match="support"):
        objective_loss(
            worked_batch(), ForwardKlTopk(name="forward_kl_topk"), LossSettings(beta_kl=0.0)
        )


def test_k1_as_a_reference_loss_is_refused():
    with pytest.raises(ValueError, match="k1"):
        LossSettings(kl_type="k1")


@pytest.mark.parametrize("kind", ["unbiased", "clipped"])
def test_the_kls_ratio_is_at_the_samples_temperature_and_its_value_at_1(kind):
    batch = worked_batch()
    tempered = replace(
        batch,
        logprobs_sampled_BT=batch.old_logprobs_sampled_BT + 0.1,
        old_logprobs_sampled_BT=batch.old_logprobs_sampled_BT,
    )
    settings = LossSettings(beta_kl=1.0, kl_type="k2", kl_ratio=kind)
    result = objective_loss(tempered, HindsightOpd(), settings)
    expected = 1.105171 * (0.02 + 0.005) / 2
    assert float(result.reduced["kl_loss"]) == pytest.approx(expected, rel=1e-5)
