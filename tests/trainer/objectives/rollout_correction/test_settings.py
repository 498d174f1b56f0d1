import pytest

from trainer.objectives.rollout_correction.settings import (
    MODES,
    RejectionRule,
    RolloutCorrectionSettings,
    health_warnings,
    rejection_rule,
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "bypas"}, "did you mean 'bypass'"),
        ({"importance_level": "geometric"}, "level of importance weights 'geometric'"),
        ({"importance_upper": 0.0}, "importance_upper"),
        ({"importance_upper": float("inf")}, "importance_upper"),
        ({"importance_upper": 2.0, "importance_lower": 2.0}, "below importance_upper"),
        ({"importance_lower": 0.5, "is_mask_mode": True}, "choose one"),
        ({"veto_threshold": 0.0}, "veto_threshold"),
        ({"veto_threshold": float("nan")}, "veto_threshold"),
        ({"rejections": (rejection_rule("token", 2.0),) * 2}, "occurs twice"),
    ],
)
def test_bad_settings(changed, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionSettings(**changed)


def test_rule_without_threshold_does_not_fall_back():
    with pytest.raises(ValueError, match="no threshold"):
        rejection_rule("sequence", None)


def test_lower_bound_defaults_to_the_reciprocal_and_may_be_zero():
    assert rejection_rule("geometric", 4.0) == RejectionRule(
        statistic="seq_mean_k1", upper=4.0, lower=0.25
    )
    assert rejection_rule("sequence", 2.0, 0.0).lower == 0.0
    assert rejection_rule("token_k3", 0.2).lower is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokens", 2.0), "did you mean 'token'"),
        (("seq_max_k1", 2.0), "unknown rejection option"),
        (("token", 2.0, 3.0), "between 0 and"),
        (("token", -1.0), "above 0"),
        (("token_k2", 0.2, 0.1), "upper bound only"),
    ],
)
def test_bad_rules(arguments, message):
    with pytest.raises(ValueError, match=message):
        rejection_rule(*arguments)


def test_what_modes_mean():
    assert MODES["decoupled"].train_logprobs == "old"
    assert MODES["bypass"].train_logprobs == MODES["pure_is"].train_logprobs == "current"
    assert [MODES[name].applies_weights for name in ("decoupled", "bypass", "pure_is")] == [
        True,
        False,
        True,
    ]
    assert MODES["pure_is"].clip_anchor is None


@pytest.mark.parametrize(
    ("metric", "healthy", "sick"),
    [
        ("rollout_is_mean_raw", (0.5, 2.0), (0.49, 2.01)),
        ("rollout_is_eff_sample_size_unclamped", (0.3, 1.0), (0.29,)),
        ("rollout_is_veto_fraction", (0.0, 0.1), (0.11,)),
        ("rollout_is_std_unclamped", (1.0,), (1.01,)),
        ("kl_fresh", (-0.1, 0.1), (-0.11, 0.11)),
        ("kl", (-0.1, 0.1), (-0.11, 0.11)),
        ("chi2_token", (1.0,), (1.01,)),
    ],
)
def test_bounds(metric, healthy, sick):
    for value in healthy:
        assert health_warnings({f"rollout_corr/{metric}": value}) == ()
    for value in sick:
        (line,) = health_warnings({f"rollout_corr/{metric}": value})
        assert line.startswith(f"rollout_corr/{metric} = ")


def test_absent_and_missing_metrics_warn_of_nothing():
    assert health_warnings({"rollout_corr/kl": float("nan")}) == ()


def test_a_policy_that_moved_is_no_engine_that_disagrees():
    (line,) = health_warnings({"kl": 0.3, "kl_fresh": 1e-5})
    assert line == "rollout_corr/kl = 0.3: the policy has moved since it sampled these"
    # All tokens are of older weights.
    (line,) = health_warnings({"kl": 0.3, "kl_fresh": float("nan")})
    assert "the policy has moved" in line


def test_an_engine_that_disagrees_is_said_once():
    (line,) = health_warnings({"kl": 0.3, "kl_fresh": 0.3})
    assert line == "rollout_corr/kl_fresh = 0.3: trainer and rollout engine are far apart"
