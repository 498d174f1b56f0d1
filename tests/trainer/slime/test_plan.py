"""Which configurations slime can train, and the flags that go with them."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest

from records.names import DropReason, SideSource
from records.training.history.window import HistoryWindow
from records.training.outcome_rewards import OutcomeRewards
from records.types import ReadySample, SideSamples, Teaching
from tests.trainer.tiny import conversation
from trainer.batch.views import TeachingPlan, unteachable
from trainer.config import TrainerConfig
from trainer.slime.plan import (
    check_args,
    loss_flags,
    policy_loss_supports,
    sample_needs,
    slime_supports,
)

TEACHER = {"support_of": "teacher"}


def config_of(**values: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"objective": {"name": "supervised_opd"}},
        {"objective": {"name": "forward_kl_topk"}},
        {"objective": {"name": "topk_tail_reverse_kl"}},
        {"objective": {"name": "self_distillation", **TEACHER}},
        {"objective": {"name": "sparse_kl", **TEACHER}},
        {"objective": {"name": "sparse_kl"}},
        {"objective": {"name": "side_samples"}},
        {"objective": {"name": "side_samples", "advantage_reference": "old", "clip": 0.2}},
        {"objective": {"surrogate": "gspo"}},
        {"correction": {"mode": "bypass"}},
        {"correction": {"preset": "geo_rs"}},
    ],
)
def test_what_engines_score_can_be_trained_in_slime(values):
    assert slime_supports(config_of(**values)) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher": {"kind": "ema"}}, "teacher.kind ema"),
        ({"objective": {"name": "self_distillation"}}, "needs a teacher in the trainer"),
        ({"objective": {"name": "overlap_topk"}}, "needs a teacher in the trainer"),
        (
            {"objective": {"name": "side_samples", "direction": "forward"}},
            "drawn by a teacher in the trainer",
        ),
        (
            {
                "objective": {"surrogate": "decoupled", "engine_cap": 2.0},
                "correction": {"importance_level": "none"},
            },
            "unset objective.engine_cap",
        ),
        ({"replay_times": 2}, "replay_times = 1"),
        ({"lora": {}}, "lora"),
        ({"pause_mode": "in_place"}, "trainer.pause_mode = abort"),
        ({"correction": {"batch_normalize": True}}, "batch_normalize"),
        ({"objective": {"surrogate": "m2po"}, "correction": {"mode": "bypass"}}, "m2po"),
    ],
)
def test_what_slime_cannot_give_is_refused_in_one_line(values, message):
    config = config_of(**values)
    reason = slime_supports(config)
    assert reason is not None
    assert message in reason
    assert "\n" not in reason
    with pytest.raises(ValueError, match="slime"):
        loss_flags(config)


@pytest.mark.parametrize(
    "values",
    [
        {"objective": {"name": "supervised_opd"}},
        {"objective": {"surrogate": "cispo"}},
        {"objective": {"opsm_delta": 0.1}},
        {"correction": {"mode": "bypass"}},
        {"kl_type": "k3"},
        {"kl_ratio": "unbiased"},
        {"correction": {"preset": "geo_rs"}},
    ],
)
def test_what_slimes_own_loss_cannot_express(values):
    config = config_of(**values)
    assert policy_loss_supports(config) is not None
    with pytest.raises(ValueError, match="custom_loss"):
        loss_flags(config, "policy_loss")


def test_flags_of_our_loss():
    flags = loss_flags(config_of(beta_kl=0.05))
    assert ("--custom-loss-function-path", "trainer.slime.hooks.loss_hook") in flags
    assert ("--custom-advantage-function-path", "trainer.slime.hooks.advantage_hook") in flags
    assert ("--kl-loss-coef", "0.05") in flags
    assert ("--use-kl-loss",) not in loss_flags(config_of(beta_kl=0.0))
    charged = {"reward_coef": 1.0, "reward_kl_coef": 0.1}
    flags = loss_flags(config_of(beta_kl=0.0, objective=charged))
    assert ("--use-kl-loss",) in flags
    assert ("--kl-loss-coef", "0.0") in flags


def policy_args(**changes: Any) -> Namespace:
    values = {
        "loss_type": "policy_loss",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "kl_loss_coef": 0.0,
        "use_kl_loss": False,
        "advantage_estimator": "grpo",
        "use_unbiased_kl": False,
        "use_tis": True,
        "custom_tis_function_path": "trainer.slime.hooks.tis_hook",
        "custom_pg_loss_reducer_function_path": None,
    }
    return Namespace(**values | changes)


def test_arguments_that_say_the_same():
    check_args(Namespace(loss_type="custom_loss"), config_of())
    check_args(policy_args(), config_of(beta_kl=0.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_temperature": 0.7}, "rollout_temperature is 0.7 and must be 1.0"),
        ({"use_opd": True}, "use_opd is True"),
        ({"normalize_advantages": True}, "normalize_advantages"),
        ({"calculate_per_token_loss": True}, "calculate_per_token_loss"),
        ({"allgather_cp": True}, "allgather_cp"),
        ({"loss_type": "sft_loss"}, "set custom_loss"),
        ({"eps_clip": 0.3}, "eps_clip is 0.3 and the run's is 0.2"),
        ({"use_tis": False}, "use_tis is False"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "use_kl_loss is True"),
    ],
)
def test_arguments_that_would_train_something_else(changes, message):
    with pytest.raises(ValueError, match=message):
        check_args(policy_args(**changes), config_of(beta_kl=0.0))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"objective": {"reward_coef": 1.0}},
        {"objective": {"opd_coef": 0.0, "reward_coef": 1.0}},
        {"objective": {"name": "supervised_opd"}},
        {"objective": {"name": "forward_kl_topk", "topk": 3}},
    ],
)
def test_turns_are_dropped_for_what_the_trainer_would_refuse(values):
    config = config_of(**values)
    plan = TeachingPlan(
        options=config.objective, model=None, vocab_size=64, max_tokens=0, device="cpu"
    )
    (turn,) = conversation("a", [(5, 3)], seed=1)
    nothing = np.full_like(turn.teacher_logprobs, np.nan)
    for reward in (None, 0.0, -1.0):
        for logprobs in (turn.teacher_logprobs, nothing):
            for size in (0, 2, 3):
                sample = replace(turn, reward=reward, teacher_logprobs=logprobs)
                if size:
                    sample = replace(sample, teachings=(teaching(sample, size),))
                needs = sample_needs(config)
                assert needs.lacking(sample) == unteachable(sample, plan)


@pytest.mark.parametrize(
    ("objective", "source"),
    [
        ({"name": "side_samples", "samples": 3}, SideSource.POLICY),
        ({"name": "sparse_kl", "topk": 3}, SideSource.POLICY_TOP),
    ],
)
def test_turns_without_their_side_samples_are_dropped(objective, source):
    needs = sample_needs(config_of(objective=objective))
    assert type(needs).model_validate(json.loads(json.dumps(needs.model_dump()))) == needs
    (turn,) = conversation("a", [(5, 3)], seed=1)

    def lacking(size: int = 3, of: SideSource = source, taught: float = -1.0) -> DropReason | None:
        shape = (len(turn.response_ids), size)
        side = SideSamples(
            ids=np.zeros(shape, dtype=np.int32),
            rollout_logprobs=np.full(shape, -1.0, dtype=np.float32),
            teacher_logprobs=np.full(shape, taught, dtype=np.float32),
            policy_version=0,
            source=of,
        )
        return needs.lacking(replace(turn, side_samples=side))

    assert lacking() is None
    assert needs.lacking(turn) is DropReason.SAMPLING_WEIGHTS_GONE
    assert lacking(size=2) is DropReason.SAMPLING_WEIGHTS_GONE
    (other,) = {SideSource.POLICY, SideSource.POLICY_TOP} - {source}
    assert lacking(of=other) is DropReason.SAMPLING_WEIGHTS_GONE
    assert lacking(taught=np.nan) is DropReason.TEACHER_LOGPROBS_INVALID
    assert sample_needs(config_of()).lacking(turn) is None
    # What learns from its reward alone needs none.
    rewarded = sample_needs(config_of(objective=objective | {"reward_coef": 1.0}))
    nothing = np.full_like(turn.teacher_logprobs, np.nan)
    assert rewarded.lacking(replace(turn, teacher_logprobs=nothing, reward=1.0)) is None


def teaching(sample: ReadySample, size: int) -> Teaching:
    shape = (len(sample.response_ids), size)
    return Teaching(
        candidate=0,
        hint=sample.hint,
        teacher="test",
        teacher_version="0",
        hinted_prompt_ids=sample.prompt_ids,
        teacher_logprobs=sample.teacher_logprobs,
        topk_ids=np.zeros(shape, dtype=np.int32),
        topk_logprobs=np.zeros(shape, dtype=np.float32),
    )


def test_slime_is_told_which_earlier_answers_a_turn_needs():
    rewarded = {"reward_coef": 1.0}
    assert sample_needs(config_of()).history is None
    # Not compared, but reported by how hard their prompts are.
    assert sample_needs(config_of(objective=rewarded)).history == HistoryWindow(versions=32)
    grouped = config_of(objective=rewarded | {"reward_baseline": "prompt"})
    assert sample_needs(grouped).history == grouped.history == HistoryWindow(versions=32)
    anchored = config_of(
        objective=rewarded | {"length_penalty": "anchor", "length_anchor": "first_pass"},
        prompt_history_versions=4,
    )
    needs = sample_needs(anchored)
    assert needs.history == anchored.history == HistoryWindow(versions=4, first=True)
    assert type(needs).model_validate(needs.model_dump(mode="json")) == needs


@pytest.mark.parametrize("opd_coef", [0.0, 1.0])
def test_slime_is_told_how_rewards_are_made_of_outcomes(opd_coef: float):
    only = {"reward_coef": 1.0, "opd_coef": opd_coef, "reward_outcome": "only"}
    compared = config_of(objective=only | {"reward_baseline": "session"}, outcome_wait_s=7.0)
    needs = sample_needs(compared)
    assert needs.outcomes == compared.outcomes()
    assert needs.outcomes == OutcomeRewards(kind="only", wait_s=7.0, hints_train=opd_coef > 0)
    assert (
        needs.history
        == compared.history
        == HistoryWindow(versions=32, sessions=True, outcomes=True)
    )
    by_prompt = config_of(objective=only | {"reward_baseline": "prompt"})
    assert sample_needs(by_prompt).history == HistoryWindow(versions=32, outcomes=True)
    assert sample_needs(config_of(objective={"reward_coef": 1.0})).outcomes is None


def test_slime_is_told_all_that_the_embedded_trainer_reads_beside_a_batch():
    only = {"reward_coef": 1.0, "reward_outcome": "only"}
    first_pass = {"length_penalty": "anchor", "length_anchor": "first_pass"}
    objectives: list[dict[str, Any]] = [
        {"reward_coef": 1.0, "reward_baseline": "prompt"},
        {"reward_coef": 1.0, **first_pass},
        *(only | {"reward_baseline": one} for one in ("none", "session", "process")),
    ]
    asked: set[str] = set()
    for objective in objectives:
        config = config_of(objective=objective, prompt_history_versions=5)
        needs = sample_needs(config)
        read = type(needs).model_validate(json.loads(json.dumps(needs.model_dump())))
        assert (read.history, read.outcomes) == (config.history, config.outcomes())
        assert config.history is not None
        asked |= {name for name, value in asdict(config.history).items() if value}
    # Each kind of reading is asked for by one of them.
    assert asked == {one.name for one in fields(HistoryWindow)}


@pytest.mark.parametrize("schedule", ["sync", "step_off"])
def test_no_schedule_holds_the_messages_that_an_outcome_waits_for(schedule: str):
    steps = {"steps_off": 1} if schedule == "step_off" else {}
    with pytest.raises(ValueError, match="turns wait for session outcomes"):
        config_of(
            objective={"reward_coef": 1.0, "reward_outcome": "add"}, schedule=schedule, **steps
        )
