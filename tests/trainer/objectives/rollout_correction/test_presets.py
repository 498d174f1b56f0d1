import pytest

from trainer.objectives.rollout_correction.presets import PRESET_NAMES, preset
from trainer.objectives.rollout_correction.settings import rejection_rule


def test_every_preset_can_be_built():
    settings = {name: preset(name) for name in PRESET_NAMES}
    assert {name for name, each in settings.items() if each.mode == "bypass"} == {
        "ppo_is_bypass",
        "bypass_ppo_clip",
        "bypass_ppo_clip_geo_rs",
        "bypass_ppo_clip_k3_rs",
    }
    assert {name for name, each in settings.items() if each.mode == "pure_is"} == {
        "pure_is",
        "bypass_pg_is",
        "bypass_pg_token_icepop",
        "bypass_pg_geo_rs",
        "bypass_pg_geo_rs_seq_tis",
        "bypass_pg_geo_rs_token_tis",
    }
    assert {name for name, each in settings.items() if each.veto_threshold} == {"geo_rs", "geo_mis"}


@pytest.mark.parametrize(
    ("name", "level", "rejections"),
    [
        ("disabled", None, ()),
        ("token_is", "token", ()),
        ("seq_is_rs", "sequence", (rejection_rule("sequence", 2.0, 0.5),)),
        ("seq_mis", "sequence", (rejection_rule("sequence", 2.0, 0.0),)),
        ("geo_rs", None, (rejection_rule("geometric", 1.001, 1 / 1.001),)),
        ("pure_is", "sequence", ()),
        ("decoupled_seq_is_rs", "sequence", (rejection_rule("sequence", 2.0, 0.5),)),
        ("decoupled_geo_rs_token_tis", "token", (rejection_rule("geometric", 1.001, 0.999),)),
        ("decoupled_k3_rs_seq_tis", "sequence", (rejection_rule("seq_mean_k3", 0.01),)),
    ],
)
def test_what_presets_contain(name, level, rejections):
    settings = preset(name)
    assert (settings.importance_level, settings.rejections) == (level, rejections)


def test_icepop_bounds():
    settings = preset("decoupled_token_icepop")
    assert (settings.importance_lower, settings.importance_upper) == (0.5, 5.0)


def test_a_new_threshold_moves_the_lower_bound_unless_it_is_zero():
    assert preset("decoupled_geo_rs", rs_threshold=1.25).rejections[0].lower == 0.8
    assert preset("seq_mis", rs_threshold=4.0).rejections[0].lower == 0.0
    assert (
        preset("geo_rs", rs_threshold_lower=0.99, veto_threshold=1e-6).rejections[0].lower == 0.99
    )


def test_errors_name_what_to_do():
    with pytest.raises(ValueError, match="did you mean 'seq_is_rs'"):
        preset("seq_is_r")
    with pytest.raises(ValueError, match="leave is_threshold out"):
        preset("geo_rs", is_threshold=2.0)
    with pytest.raises(ValueError, match="leave rs_threshold out"):
        preset("token_is", rs_threshold=2.0)
