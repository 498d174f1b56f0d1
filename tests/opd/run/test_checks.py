"""Configurations that are wrong together are refused in one line that says what to set instead."""

from pathlib import Path

import pytest

from judge.verifier.config import VerifierConfig
from opd.run.checks import run_warnings
from opd.run.config import load, save
from opd.run.defaults import resolve, single_machine
from opd.run.start_checks import check_verifier
from records.training.outcome_rewards import OutcomeRewards
from trainer.config import TrainerConfig
from trainer.config_checks import leaves_stale_uncorrected
from trainer.errors import ConfigError, StartupError
from trainer.step.report import stale_uncorrected

REFUSED = [
    (["objective.estimator='k2'"], "use k1"),
    (["objective.estimator='forward_kl_topk'"], "policy gradient"),
    (["objective.name='supervised_opd'", "objective.estimator='k1'"], "use low_var_kl"),
    (["objective.name='supervised_opd'", "objective.estimator='kl'"], "use low_var_kl"),
    (["kl_type='kl'"], "use low_var_kl"),
    (["objective.name='forward_kl_topk'"], "set scoring.top_k"),
    (["objective.name='topk_tail_reverse_kl'"], "set scoring.top_k"),
    (["objective.name='self_distillation'"], "set trainer.teacher.kind"),
    (["objective.name='side_samples'", "objective.direction='forward'"], "trainer.teacher.kind"),
    (
        [
            "objective.name='side_samples'",
            "objective.direction='forward'",
            "objective.importance=false",
        ],
        "has no ratio",
    ),
    (
        ["objective.name='overlap_topk'", "teacher.kind='frozen'"],
        "judge.selection = shortest_first",
    ),
    (["objective.reward_coef=1.0"], "set judge.reward"),
    (["objective.opd_coef=0.0"], "nothing to learn"),
    (["objective.mix='replace'"], "pass_rate_threshold"),
    (["objective.surrogate='pure_is'"], "set both"),
    (["correction.mode='pure_is'"], "set both"),
    (["objective.surrogate='m2po'"], "correction.mode = bypass"),
    (["objective.surrogate='decoupled'"], "importance_level = none"),
    (["objective.normalise=true", "objective.advantage_reference='current'"], "old"),
    (["objective.surrogate='cispo'", "objective.dual_clip=3.0"], "unset it"),
    (["correction.rejections=[{statistic='token'}]"], "no threshold"),
    (["correction.veto_threshold=0.0"], "above 0"),
    (["objective.name='supervised_opd'"], "set trainer.beta_kl = 0.0"),
    (["objective.surrogate='unclipped'", "objective.clip_low=0.1"], "unset them"),
    (["correction.importance_level='none'", "correction.batch_normalize=true"], "applies no"),
    (["correction.importance_level='none'", "correction.importance_lower=0.5"], "applies no"),
    (["correction.preset='seq_is'", "correction.importance_level='token'"], "choose one"),
    (["objective.name='sparse_kl'", "objective.alpha=0.2"], "alpha has no meaning"),
    (
        [
            "objective.name='sparse_kl'",
            "objective.direction='policy_gradient'",
            "objective.token_clip=1.0",
        ],
        "token_clip has no meaning",
    ),
    (["objective.name='sparse_kl'", "objective.tail=true"], "tail belongs to direction skewed"),
    (
        ["objective.name='side_samples'", "objective.clip=0.2", "objective.importance=false"],
        "unset one",
    ),
    (["correction.veto_threshold=-1.0"], "above 0"),
    (["correction.importance_lower=3.0"], "below importance_upper"),
    (["correction.preset='geo_r'"], "did you mean 'geo_rs'"),
    (["correction.preset='geo_rs'", "correction.mode='bypass'"], "choose one"),
    (["aggregation='seq-mean-token-sum-norm'"], "set both"),
    (["objective.name='forward_topk'"], "did you mean 'forward_kl_topk'"),
    (["objective.clip_lo=0.1"], "did you mean 'clip_low'"),
    (["objective.name='topk_tail_reverse_kl'", "objective.top_k=4"], "did you mean 'topk'"),
]


def resolved(tmp_path: Path, overrides: list[str]):
    values = single_machine("examples/tool_lab/model", tmp_path)
    return resolve(values, None, [f"trainer.{one}" for one in overrides])


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(tmp_path, overrides)
    assert len(str(caught.value).splitlines()) == 1


ONLY = ["trainer.objective.reward_coef=1.0", "trainer.objective.reward_outcome=only"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*ONLY, "judge.reward=votes"], "set judge.reward = .outcome., or reward_outcome = .add."),
        (["judge.reward=outcome"], "set trainer.objective.reward_outcome = .only."),
        (
            [ONLY[0], "judge.reward=outcome", "trainer.objective.reward_outcome=add"],
            "set trainer.objective.reward_outcome = .only.",
        ),
    ],
)
def test_outcomes_that_one_section_counts_on_and_another_does_not(tmp_path, overrides, words):
    values = single_machine("examples/tool_lab/model", tmp_path)
    with pytest.raises(ConfigError, match=words):
        resolve(values, None, overrides)
    with pytest.raises(ConfigError, match="= resample answers again"):
        resolve(values, None, [*ONLY, "judge.reward=outcome", "replay.mode=resample"])
    config = resolve(values, None, [*ONLY, "judge.reward=outcome"])
    assert config.trainer.outcomes() == OutcomeRewards(kind="only", wait_s=600.0)
    assert config.trainer.outcomes(finishes=True) == OutcomeRewards(kind="only", wait_s=0.0)
    assert config.waiting.outcome_wait_s == 600.0


def test_turns_are_valued_by_somebody(tmp_path):
    values = single_machine("examples/tool_lab/model", tmp_path)
    process = [*ONLY, "judge.reward=outcome", "trainer.objective.reward_baseline=process"]
    asked = ["verifier.source=checks:booked", "verifier.continuations=4"]
    with pytest.raises(ConfigError, match="continuations are judged by a verifier: set source"):
        resolve(values, None, [*process, *asked[1:]])
    for some in ([], asked[:1]):
        with pytest.raises(ConfigError, match=r"set verifier\.source, and verifier\.continuations"):
            resolve(values, None, [*process, *some])
    history = resolve(values, None, [*process, *asked]).trainer.history
    assert history is not None
    assert (history.values, history.sessions) == (True, True)
    with pytest.raises(ConfigError, match="has no meaning with reward_baseline process"):
        resolve(values, None, [*process, *asked, "trainer.objective.divide_by_std=false"])


def test_a_verifier_that_cannot_be_called_is_told_before_anything_starts():
    check_verifier(VerifierConfig(source="tests.judge.verifier.judged_by:words"))
    check_verifier(VerifierConfig())
    with pytest.raises(
        StartupError, match=r"verifier\.source: nowhere:f cannot be called: .*nowhere"
    ):
        check_verifier(VerifierConfig(source="nowhere:f"))


def test_too_few_topk_scores_of_the_engine(tmp_path):
    values = single_machine("examples/tool_lab/model", tmp_path)
    overrides = ["trainer.objective.name='forward_kl_topk'", "trainer.beta_kl=0", "scoring.top_k=8"]
    with pytest.raises(ConfigError, match=r"topk 32 exceeds scoring\.top_k 8"):
        resolve(values, None, overrides)
    config = resolve(values, None, [*overrides, "trainer.objective.topk=8"])
    assert config.trainer.objective.support_size == 8


def test_side_samples_may_have_several_teachers(tmp_path):
    values = single_machine("examples/tool_lab/model", tmp_path)
    teachers = ["scoring.teachers.math=http://10.0.0.5:1", "trainer.beta_kl=0"]
    for name in ("side_samples", "sparse_kl"):
        config = resolve(values, None, [f"trainer.objective.name='{name}'", *teachers])
        assert config.trainer.side_source is not None
    unscored = ["trainer.objective.name='side_samples'", "scoring.engine_scores=false"]
    with pytest.raises(ConfigError, match="needs teacher_tokens: let an engine score"):
        resolve(values, None, [*unscored, *teachers, "scoring.least_fall=0"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["correction.preset='seq_is_rs'", "correction.importance_upper=3.0"],
        ["correction.preset='geo_rs'"],
        ["correction.preset='decoupled_token_icepop'", "correction.importance_upper=2.0"],
        ["objective.name='self_distillation'", "teacher.kind='ema'", "beta_kl=0.0"],
        ["objective.surrogate='unclipped'", "correction.mode='bypass'"],
    ],
)
def test_a_resolved_configuration_reads_back_as_it_was(tmp_path, overrides):
    config = resolved(tmp_path, overrides)
    save(config, tmp_path / "config.toml")
    again = load(tmp_path / "config.toml")
    assert again == config
    assert again.trainer.correction.settings() == config.trainer.correction.settings()


def test_what_is_allowed_and_probably_not_meant_is_warned_of():
    def lines(**values):
        return "\n".join(run_warnings(TrainerConfig.model_validate(values)))

    assert lines() == ""
    assert "uncorrected" in lines(correction={"importance_level": "none"})
    assert lines(correction={"importance_level": "none"}, max_staleness=0) == ""
    assert "direction" in lines(objective={"estimator": "k3"})


def test_a_value_beside_a_preset_counts_also_where_it_is_the_default_elsewhere(tmp_path):
    overrides = ["correction.preset='decoupled_token_icepop'"]
    assert resolved(tmp_path, overrides).trainer.correction.settings().importance_upper == 5.0
    given = resolved(tmp_path, [*overrides, "correction.importance_upper=2.0"])
    assert given.trainer.correction.settings().importance_upper == 2.0


def test_a_preset_takes_the_place_of_a_resolved_correction(tmp_path):
    save(resolved(tmp_path, []), tmp_path / "config.toml")
    again = load(tmp_path / "config.toml", ["trainer.correction.preset=geo_rs"])
    assert again.trainer.correction.settings().importance_level is None


def test_a_preset_comes_to_a_threshold_of_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text("[trainer.correction]\nveto_threshold = 1e-4\n")
    values = single_machine("examples/tool_lab/model", tmp_path)
    overrides = ["trainer.correction.preset=seq_is"]
    config = resolve(values, tmp_path / "mine.toml", overrides)
    settings = config.trainer.correction.settings()
    assert (settings.importance_level, settings.veto_threshold) == ("sequence", 1e-4)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.schedule=sync"], "schedule = sync holds requests of agents"),
        (["trainer.schedule=step_off", "trainer.steps_off=1"], "schedule = step_off holds"),
        (["replay.staleness_eta=5"], r"staleness_eta = 5 .*max_staleness = 4 lets train"),
        (["trainer.max_staleness=0"], r"staleness_eta = 1 .*max_staleness = 0 lets train"),
    ],
)
def test_resampling_has_a_limiter_of_its_own_that_fits_the_trainer(tmp_path, overrides, said):
    values = single_machine("examples/tool_lab/model", tmp_path)
    asked = ["replay.mode=resample", "rehearsal.enabled=false"]
    assert resolve(values, None, asked).replay.staleness_eta == 1
    with pytest.raises(ConfigError, match=said) as refused:
        resolve(values, None, [*asked, *overrides])
    assert "\n" not in str(refused.value)
    # Other replays sample nothing.
    assert resolve(values, None, ["rehearsal.enabled=false", *overrides])


def test_both_kls_are_there_where_somebody_names_the_second(tmp_path):
    config = resolved(tmp_path, ["objective.name='supervised_opd'", "beta_kl=0.02"])
    assert config.trainer.beta_kl == 0.02


def test_stale_samples_without_correction_are_told_from_others():
    def left(**values):
        return leaves_stale_uncorrected(TrainerConfig.model_validate(values))

    assert left(correction={"importance_level": "none"})
    assert not left()
    assert not left(correction={"mode": "bypass"})
    assert not left(objective={"surrogate": "decoupled"}, correction={"importance_level": "none"})
    assert not left(objective={"name": "supervised_opd"}, correction={"importance_level": "none"})


def test_turns_that_train_stale_and_uncorrected_are_counted():
    name = "guard/stale_uncorrected_turns"
    plain = TrainerConfig.model_validate({"correction": {"importance_level": "none"}})
    assert stale_uncorrected([0, 2, 1], plain) == {name: 2}
    assert stale_uncorrected([0, 2, 1], TrainerConfig()) == {name: 0}
