import pytest

from trainer.objectives.rollout_correction.health import health_warnings


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
