import subprocess
import sys

import pytest

from trainer.objectives.names import (
    check_kl_terms,
    check_loss_mode,
)


def refusal(check, *args, **options) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        check(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["k1", "kl"])
def test_k1_is_no_loss_under_any_name(mode):
    message = refusal(check_loss_mode, mode, use_policy_gradient=False)
    assert "k1+, k2 or k3" in message
    assert check_loss_mode(f"{mode}+", use_policy_gradient=False) is None
    assert check_loss_mode(mode, use_policy_gradient=True) is None


@pytest.mark.parametrize("mode", ["k2", "mse", "k2+", "forward_kl_topk", "topk_tail_reverse_kl"])
def test_a_divergence_without_direction_is_no_advantage(mode):
    assert mode in refusal(check_loss_mode, mode, use_policy_gradient=True)
    assert check_loss_mode(mode, use_policy_gradient=False) is None


@pytest.mark.parametrize("mode", ["abs", "k3", "low_var_kl"])
def test_abs_and_k3_as_advantage_are_warned_of(mode):
    warning = check_loss_mode(mode, use_policy_gradient=True)
    assert warning is not None
    assert "k1" in warning
    assert check_loss_mode(mode, use_policy_gradient=False) is None


def test_unknown_names_get_the_nearest_one():
    assert "'forward_kl_topk'" in refusal(
        check_loss_mode, "forward_kl_top", use_policy_gradient=False
    )


def test_two_kl_terms_are_warned_of_unless_both_are_asked_for():
    warning = check_kl_terms(teacher_kl_is_loss=True, reference_kl_coef=0.02)
    assert warning is not None
    assert "0.02" in warning
    assert check_kl_terms(teacher_kl_is_loss=False, reference_kl_coef=0.02) is None
    assert check_kl_terms(teacher_kl_is_loss=True, reference_kl_coef=0.0) is None
    explicit = check_kl_terms(teacher_kl_is_loss=True, reference_kl_coef=0.1, both_explicit=True)
    assert explicit is None


def test_configuration_can_check_without_torch():
    code = "import sys, trainer.objectives.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
