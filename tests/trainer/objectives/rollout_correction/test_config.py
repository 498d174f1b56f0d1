import math

import pytest
from pydantic import ValidationError

from trainer.objectives.rollout_correction.config import (
    PRESET_NAMES,
    CorrectionConfig,
    preset,
    settings_from_verl,
)
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


def test_no_options_correct_nothing():
    assert settings_from_verl({}) == preset("disabled")


def test_options_of_the_page():
    options = {
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.001,
        "rollout_rs_threshold_lower": None,
        "rollout_token_veto_threshold": 1e-4,
    }
    assert settings_from_verl(options) == preset("geo_rs")
    pure = {
        "rollout_is": "sequence",
        "bypass_old_logprob_for_rollout": True,
        "use_pure_rollout_correction": True,
    }
    assert settings_from_verl(pure) == preset("pure_is")


def test_options_of_verl():
    options = {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_5.0",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1, seq_mean_k3",
        "rollout_rs_threshold": "0.5_3.0,0.05",
        "bypass_mode": True,
        "loss_type": "reinforce",
    }
    settings = settings_from_verl(options)
    assert (settings.importance_lower, settings.importance_upper) == (0.5, 5.0)
    assert settings.batch_normalize
    assert settings.mode == "pure_is"
    assert settings.rejections == (
        rejection_rule("token", 3.0, 0.5),
        rejection_rule("seq_mean_k3", 0.05),
    )


def test_one_threshold_serves_all_options_and_a_name_counts_once():
    settings = settings_from_verl(
        {"rollout_rs": "seq_max_k2,token_k2,seq_max_k2", "rollout_rs_threshold": "0.3"}
    )
    assert [rule.statistic for rule in settings.rejections] == ["seq_max_k2", "token_k2"]
    assert {rule.upper for rule in settings.rejections} == {0.3}


def test_verl_semantics_bound_the_inverse_ratio():
    options = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_3.0"}
    rule = settings_from_verl(options, semantics="verl").rejections[0]
    assert (rule.lower, rule.upper) == (1 / 3, 2.0)
    open_end = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0_3"}
    assert settings_from_verl(open_end, semantics="verl").rejections[0].upper == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_iss": "token"}, "did you mean 'rollout_is'"),
        ({"rollout_is": "geometric"}, "level of importance weights"),
        ({"rollout_is": "token", "rollout_is_threshold": "a_b"}, "lower_upper"),
        ({"rollout_rs": "token"}, "no rollout_rs_threshold"),
        ({"rollout_rs": "token,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "2 entries"),
        ({"rollout_rs": "tokn", "rollout_rs_threshold": 2.0}, "did you mean 'token'"),
        ({"bypass_mode": True, "loss_type": "reinforced"}, "did you mean 'reinforce'"),
        ({"use_pure_rollout_correction": True}, "set both"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        settings_from_verl(options)


VERL = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_3.0"}


def test_a_run_takes_verls_names_and_is_read_again_as_it_was_set():
    config = CorrectionConfig.model_validate({"verl": VERL})
    assert config.settings() == settings_from_verl(VERL, semantics="verl")
    as_the_page = CorrectionConfig.model_validate({"verl": VERL, "verl_semantics": "page"})
    assert as_the_page.settings() == settings_from_verl(VERL)
    for one in (config, as_the_page, CorrectionConfig()):
        written = one.model_dump()
        assert CorrectionConfig.model_validate(written).settings() == one.settings()
    assert "verl_semantics" not in CorrectionConfig().model_dump()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"verl": {"rollout_si": "token"}}, "unknown option"),
        ({"verl": VERL, "importance_level": "token"}, "verl and importance_level are both set"),
        ({"verl_semantics": "page"}, "set verl, too"),
    ],
)
def test_what_verl_does_not_know_or_stands_beside_it_is_refused(values, said):
    with pytest.raises(ValidationError, match=said):
        CorrectionConfig.model_validate(values)
