import pytest
import torch

from tests.trainer.objectives.rollout_correction.worked import MASK, ROLLOUT, TRAIN
from trainer.objectives.rollout_correction.correct import correct_rollout
from trainer.objectives.rollout_correction.settings import (
    RolloutCorrectionSettings,
    rejection_rule,
)


def correct(**options):
    settings = RolloutCorrectionSettings(**{"importance_level": None, **options})
    return correct_rollout(TRAIN, ROLLOUT, MASK, settings)


def check(metrics, expected):
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=1e-6), name


def test_off_policy_metrics():
    expected = {
        "kl": 0.001117,
        "k3_kl": 0.306672,
        "chi2_token": 1.814722,
        "chi2_seq": 4.680867,
        "ppl_ratio": 1.099849,
    }
    check(correct().metrics, expected)


def test_token_weights_before_and_after_truncation():
    result = correct(importance_level="token")
    weights = torch.tensor([[1, 2, 2, 0.5], [0.25, 1, 1, 0], [1.1, 0.9, 0, 0]]).double()
    torch.testing.assert_close(result.weights_BT, weights)
    expected = {
        "rollout_is_mean": 1.083333,
        "rollout_is_std": 0.554777,
        "rollout_is_eff_sample_size": 0.792237,
        "rollout_is_ratio_fraction_high": 1 / 9,
        "rollout_is_ratio_fraction_low": 2 / 9,
        "rollout_is_mean_raw": 1.305556,
        "rollout_is_max_raw": 4.0,
        "rollout_is_std_raw": 0.517353,
        "rollout_is_eff_sample_size_raw": 0.821828,
    }
    check(result.metrics, expected)


def test_sequence_weights():
    result = correct(importance_level="sequence")
    assert result.weights_BT is not None
    torch.testing.assert_close(result.weights_BT[:, 0], torch.tensor([2.0, 0.25, 0.99]).double())
    expected = {
        "rollout_is_mean": 1.192222,
        "rollout_is_eff_sample_size": 0.704913,
        "rollout_is_mean_raw": 2.081111,
    }
    check(result.metrics, expected)


def test_mask_mode_leaves_weights_alone():
    result = correct(
        importance_level="token", is_mask_mode=True, rejections=(rejection_rule("token", 3.0),)
    )
    assert result.weights_BT is not None
    assert result.weights_BT[0, 2].item() == pytest.approx(4.0)
    assert result.mask_BT[0].tolist() == [1, 1, 0, 1]


def test_icepop_zeroes_weights_and_keeps_the_mask():
    # 0.4, not 0.5: a ratio that equals its bound may round to either side.
    result = correct(importance_level="token", importance_lower=0.4, importance_upper=2.5)
    assert result.weights_BT is not None
    torch.testing.assert_close(result.weights_BT[0], torch.tensor([1, 2, 0, 0.5]).double())
    assert result.weights_BT[1, 0].item() == 0
    assert torch.equal(result.mask_BT, MASK)
    check(result.metrics, {"rollout_is_oob_ratio": 2 / 9})


def test_batch_normalisation():
    result = correct(importance_level="token", batch_normalize=True)
    check(result.metrics, {"rollout_is_batch_norm_factor": 1.083333, "rollout_is_mean": 1.083333})
    assert result.weights_BT is not None
    assert (result.weights_BT.sum() / MASK.sum()).item() == pytest.approx(1.0)
    by_row = correct(importance_level="sequence", batch_normalize=True)
    check(by_row.metrics, {"rollout_is_batch_norm_factor": (2 + 0.25 + 0.99) / 3})


def test_rejection_by_token_and_by_geometric_mean():
    result = correct(rejections=(rejection_rule("token", 2.1, 0.6),))
    assert result.mask_BT.tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]
    expected = {
        "rollout_rs_masked_fraction": 3 / 9,
        "rollout_is_masked_fraction": 3 / 9,
        "rollout_rs_seq_masked_fraction": 2 / 3,
    }
    check(result.metrics, expected)
    geometric = correct(rejections=(rejection_rule("geometric", 1.3, 0.8),))
    assert geometric.mask_BT.sum(dim=-1).tolist() == [0, 0, 2]
    check(geometric.metrics, {"rollout_rs_max": 2**0.5, "rollout_rs_min": 0.25 ** (1 / 3)})


def test_several_rules_and_together():
    both = correct(rejections=(rejection_rule("token", 5.0, 0.3), rejection_rule("geometric", 1.3)))
    assert both.mask_BT.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


def test_veto_rejects_the_row_and_not_its_weights():
    result = correct(importance_level="token", veto_threshold=0.3)
    assert result.mask_BT.sum(dim=-1).tolist() == [4, 0, 2]
    assert result.weights_BT is not None
    assert result.weights_BT[1, 0].item() == pytest.approx(0.25)
    expected = {
        "rollout_is_veto_fraction": 1 / 3,
        "rollout_is_catastrophic_token_fraction": 1 / 9,
    }
    check(result.metrics, expected)
    assert any("veto_fraction" in line for line in result.warnings)


def test_bounds_of_k1_are_on_trainer_over_rollout():
    # 4 is above 3; 0.5 stays although its inverse is 2.
    result = correct(rejections=(rejection_rule("token_k1", 3.0, 0.4),))
    assert result.mask_BT[0].tolist() == [1, 1, 0, 1]
