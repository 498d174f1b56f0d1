"""Rewards of a batch's turns as advantages: lengths, baselines, turns without a reward."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from records.training.outcome_rewards import as_reward
from records.types import NO_HISTORY, PastAnswer, PastSession, PromptHistory, SessionOutcome
from trainer.batch.comparisons import RewardFacts, compare
from trainer.batch.reward_view import length_metrics, view_rewards
from trainer.objectives.options import HindsightOpd, SupervisedOpd


def turn(
    reward: float | None,
    length: int = 1,
    prompt: str = "a",
    step: int = 0,
    *,
    history: PromptHistory = NO_HISTORY,
    is_cut: bool = False,
    start_kl: float | None = None,
) -> RewardFacts:
    return RewardFacts(
        reward=reward,
        step_index=step,
        prompt_key=prompt,
        length=length,
        history=history,
        is_cut=is_cut,
        start_kl=start_kl,
    )


def answers(*rewards: float, version: int = 1, length: int = 10) -> tuple[PastAnswer, ...]:
    return tuple(
        PastAnswer(
            turn_id=f"{version}-{length}-{at}", version=version, reward=reward, length=length
        )
        for at, reward in enumerate(rewards)
    )


def options(**values: object) -> HindsightOpd:
    return HindsightOpd.model_validate({"reward_coef": 1.0, **values})


BATCH = [turn(1.0, 10), turn(None, 500), turn(1.0, 30), turn(-1.0, 20), turn(1.0, 7, "b")]


def test_a_turn_without_reward_adds_nothing_and_is_compared_with_nobody() -> None:
    assert view_rewards(BATCH, options()).advantages == [1.0, 0.0, 1.0, -1.0, 1.0]
    assert view_rewards(BATCH, HindsightOpd()).advantages == [0.0] * 5
    assert view_rewards([turn(None)], options(reward_baseline="prompt")).advantages == [0.0]
    supervised = SupervisedOpd(name="supervised_opd", reward_coef=0.5)
    assert view_rewards(BATCH, supervised).advantages == [1.0, 0.0, 1.0, -1.0, 1.0]


def test_each_penalty_by_hand() -> None:
    uniform = view_rewards(BATCH, options(length_penalty="uniform", length_coef=0.01)).advantages
    assert uniform == pytest.approx([0.9, 0.0, 0.7, -1.2, 0.93])
    # Of prompt a, 10, 30 and 20 tokens: lambda 0.5, -0.5 and 0, and a wrong answer gains nothing;
    # b's is alone.
    group = view_rewards(BATCH, options(length_penalty="group")).advantages
    assert group == pytest.approx([1.05, 0.0, 0.95, -1.0, 1.0])
    anchor = view_rewards(BATCH, options(length_penalty="anchor", length_anchor=10)).advantages
    assert anchor == pytest.approx([1.0, 0.0, 1.0 - 0.01 * 2, -1.0 - 0.01, 1.0])


def test_baselines_compare_what_is_left_after_the_penalty() -> None:
    batch = [turn(1.0, 10), turn(1.0, 30)]
    plain = view_rewards(batch, options(reward_baseline="prompt")).advantages
    assert plain == [0.0, 0.0]
    set_ = options(reward_baseline="prompt", length_penalty="group", divide_by_std=False)
    assert view_rewards(batch, set_).advantages == pytest.approx([0.05, -0.05])


def test_pass_at_k_pays_the_lead_of_the_best_answer_to_a_prompt() -> None:
    batch = [turn(0.0), turn(1.0), turn(0.5), turn(1.0, prompt="b"), turn(None), turn(2.0, step=3)]
    lead = view_rewards(batch, options(reward_baseline="passk", divide_by_std=False)).advantages
    assert lead == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    deviation = statistics.stdev([0.0, 1.0, 0.5, 2.0])
    scaled = view_rewards(batch, options(reward_baseline="passk")).advantages
    assert scaled == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.0, 1.0 / (deviation + 1e-6)])
    alone = [turn(1.0), turn(1.0, prompt="b")]
    assert view_rewards(alone, options(reward_baseline="passk")).advantages == [0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"length_penalty": "anchor"}, "need each other"),
        ({"length_penalty": "uniform", "length_anchor": 9}, "need each other"),
        ({"length_coef": 0.1}, "length_coef has no meaning"),
        ({"length_penalty": "uniform", "reward_coef": 0.0}, "takes from a reward"),
        ({"divide_by_std": False}, "acts on a reward_baseline only"),
        ({"reward_best_of": 2, "reward_coef": 0.0}, "reward_best_of shares a reward"),
        ({"reward_best_of": 2, "reward_baseline": "passk"}, "have no lead"),
        ({"reward_kl_coef": 0.1, "reward_coef": 0.0}, "reward_kl_coef takes from a reward"),
        ({"length_warmup_steps": 3}, "length_warmup_steps has no meaning"),
        ({"length_min_pass_rate": 0.5}, "length_min_pass_rate has no meaning"),
    ],
)
def test_what_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        options(**values)


def test_metrics_tell_right_from_wrong_where_rewards_are_wanted() -> None:
    found = view_rewards(BATCH, options()).metrics
    assert found["length/mean"] == pytest.approx(567 / 5)
    assert found["length/correct_mean"] == pytest.approx(47 / 3)
    assert found["length/wrong_minus_correct"] == pytest.approx(20 - 47 / 3)
    assert not any(name.endswith("compared_frac") for name in found)
    unknown = view_rewards(BATCH, HindsightOpd()).metrics
    assert unknown["length/max"] == 500
    assert not any("correct" in name for name in unknown)
    assert math.isnan(view_rewards([turn(1.0, 3)], options()).metrics["length/wrong_mean"])


def test_turns_with_nobody_to_be_compared_with_are_counted() -> None:
    # Three of the four rewarded turns have the same prompt; all are at the same step.
    group = options(reward_baseline="step", length_penalty="group")
    found = view_rewards(BATCH, group).metrics
    assert (found["reward/compared_frac"], found["length/compared_frac"]) == (1.0, 0.75)
    assert (
        view_rewards(BATCH, options(reward_baseline="passk")).metrics["reward/compared_frac"]
        == 0.75
    )
    nobody = view_rewards([turn(None)], options(reward_baseline="prompt")).metrics
    assert math.isnan(nobody["reward/compared_frac"])


def test_a_turn_alone_in_its_batch_is_compared_with_earlier_answers_to_its_prompt() -> None:
    alone = turn(1.0, history=PromptHistory(recent=answers(0.0, 0.0, 1.0)))
    other = turn(1.0, prompt="b")
    plain = options(reward_baseline="prompt", divide_by_std=False)
    assert view_rewards([alone, other], plain).advantages == pytest.approx([0.5, 0.0])
    lead = options(reward_baseline="passk", divide_by_std=False)
    # The best is one of two equally good ones.
    assert view_rewards([alone], lead).advantages == [0.0]
    best = turn(2.0, history=PromptHistory(recent=answers(0.0, 1.5)))
    assert view_rewards([best], lead).advantages == pytest.approx([0.5])
    found = view_rewards([alone, other], plain).metrics
    assert (found["reward/compared_frac"], found["reward/past_answers"]) == (0.5, 3.0)


def test_steps_are_compared_with_earlier_answers_at_the_same_step() -> None:
    set_ = options(reward_baseline="step", divide_by_std=False)
    first = turn(1.0, history=PromptHistory(recent=answers(-1.0, -1.0, 0.0)))
    later = replace(turn(1.0, prompt="b"), step_index=1)
    # The mean of step 0 is -0.25. Nothing else is at step 1.
    assert view_rewards([first, later], set_).advantages == pytest.approx([1.25, 0.0])
    found = view_rewards([first, later], set_).metrics
    assert (found["reward/compared_frac"], found["reward/past_answers"]) == (0.5, 3.0)


def test_earlier_answers_count_once_for_a_prompt_that_a_batch_has_twice() -> None:
    history = PromptHistory(recent=answers(-1.0, -1.0))
    batch = [turn(1.0, history=history), turn(1.0, history=history)]
    assert compare(batch).rates[:2].tolist() == [0.5, 0.5]


def test_failures_of_prompts_that_rarely_pass_learn_from_the_teacher() -> None:
    set_ = options(mix="replace", pass_rate_threshold=0.25)
    seldom = PromptHistory(recent=answers(-1.0, -1.0, 1.0))
    often = PromptHistory(recent=answers(1.0, 1.0, -1.0))
    batch = [
        turn(-1.0, prompt="a", history=seldom),
        turn(-1.0, prompt="b", history=often),
        turn(1.0, prompt="c", history=seldom),
    ]
    # Of four answers to a one passed, of b two, and c's own passed.
    assert view_rewards(batch, set_).eligible == [True, False, False]
    assert view_rewards(batch, set_).metrics["opd/frac_underperforming_prompts"] == pytest.approx(
        1 / 3
    )


def test_k2_takes_the_place_of_the_reward_where_a_turn_is_eligible() -> None:
    k2 = SupervisedOpd(
        name="supervised_opd", reward_coef=1.0, mix="replace", pass_rate_threshold=0.0, horizon=4
    )
    assert view_rewards([turn(-1.0), turn(1.0, prompt="b")], k2).eligible == [True, False]
    with pytest.raises(ValidationError, match="mix = replace needs"):
        SupervisedOpd(name="supervised_opd", mix="replace")
    with pytest.raises(ValidationError, match="pass_rate_threshold goes by rewards"):
        SupervisedOpd(name="supervised_opd", pass_rate_threshold=0.5)


def test_an_anchor_is_the_length_at_which_a_prompt_first_passed_often() -> None:
    never = answers(*[1.0, -1.0] * 4, version=1, length=10)
    passed = answers(*[1.0] * 8, version=2, length=20)
    shorter = answers(*[1.0] * 8, version=3, length=5)
    history = PromptHistory(first=never + passed + shorter)
    set_ = options(length_penalty="anchor", length_anchor="first_pass")
    batch = [turn(1.0, 40, history=history), turn(1.0, 40, "b")]
    # Twice as long as 20 tokens; b has no anchor yet.
    assert view_rewards(batch, set_).advantages == pytest.approx([0.99, 1.0])
    assert view_rewards(batch, set_).metrics["length/anchored_frac"] == 0.5
    # Seven answers are too few for a pass rate.
    few = PromptHistory(first=answers(*[1.0] * 7))
    assert view_rewards([turn(1.0, 40, history=few)], set_).advantages == [1.0]


def test_a_penalty_warms_up_and_may_spare_hard_prompts() -> None:
    warm = options(length_penalty="uniform", length_coef=0.01, length_warmup_steps=4)
    assert view_rewards([turn(1.0, 10)], warm, step=0).advantages == [1.0]
    assert view_rewards([turn(1.0, 10)], warm, step=2).advantages == pytest.approx([0.95])
    assert view_rewards([turn(1.0, 10)], warm, step=9).advantages == pytest.approx([0.9])
    easy = options(length_penalty="uniform", length_coef=0.01, length_min_pass_rate=0.5)
    hard = turn(1.0, 10, history=PromptHistory(recent=answers(-1.0, -1.0)))
    assert view_rewards([hard, turn(1.0, 10, "b")], easy).advantages == pytest.approx([1.0, 0.9])
    found = view_rewards([hard, turn(1.0, 30, "b")], easy).metrics
    assert (found["length/hard_mean"], found["length/easy_mean"]) == (10.0, 30.0)


def test_a_cut_answer_teaches_nothing_if_it_is_to_be_so() -> None:
    batch = [turn(1.0, is_cut=True), turn(-1.0, prompt="b")]
    assert view_rewards(batch, options()).advantages == [1.0, -1.0]
    assert view_rewards(batch, options()).eligible == [True, True]
    silent = options(zero_cut_answers=True)
    assert view_rewards(batch, silent).advantages == [0.0, -1.0]
    assert view_rewards(batch, silent).eligible == [False, True]


def test_a_reward_pays_for_what_the_policy_gives_more_than_the_start() -> None:
    set_ = options(reward_kl_coef=0.1, reward_baseline="prompt", divide_by_std=False)
    past = PromptHistory(recent=answers(5.0, 5.0))
    batch = [turn(1.0, start_kl=4.0, history=past), turn(1.0, start_kl=-2.0, history=past)]
    # 0.6 and 1.2 with a mean of 0.9: earlier answers, whose nats nobody knows, do not count.
    assert view_rewards(batch, set_).advantages == pytest.approx([-0.3, 0.3])
    found = view_rewards(batch, set_).metrics
    assert (found["reward/start_kl"], found["reward/compared_frac"]) == (1.0, 1.0)


def test_every_k_answers_to_a_prompt_share_the_best_of_theirs() -> None:
    set_ = options(reward_best_of=2)
    # The newest earlier answer of a prompt comes first: -1 and 1 share 1, and the older is left.
    one = turn(-1.0, history=PromptHistory(recent=answers(1.0, -1.0)))
    assert view_rewards([one, turn(-1.0, prompt="b")], set_).advantages == [1.0, -1.0]
    pair = [turn(0.0), turn(0.5), turn(-1.0)]
    assert view_rewards(pair, set_).advantages == [0.5, 0.5, -1.0]


def test_a_turn_of_the_batch_is_never_its_own_past() -> None:
    """slime leases a batch in parts, and the second part sees the first in the store."""
    mine = PastAnswer(turn_id="first", version=1, reward=1.0, length=10)
    other = PastAnswer(turn_id="older", version=1, reward=1.0, length=10)
    first = replace(turn(1.0), turn_id="first")
    second = replace(turn(-1.0, history=PromptHistory(recent=(mine, other))), turn_id="second")
    assert compare([first, second]).rates[:2].tolist() == pytest.approx([2 / 3, 2 / 3])


def test_hard_prompts_are_spared_by_the_pass_rate_that_is_reported() -> None:
    history = PromptHistory(recent=answers(*[-1.0] * 9))
    set_ = options(
        reward_kl_coef=0.1, length_penalty="uniform", length_coef=0.05, length_min_pass_rate=0.5
    )
    hard = turn(1.0, 10, history=history, start_kl=0.0)
    assert view_rewards([hard], set_).advantages == [1.0]
    assert view_rewards([hard], set_).metrics["length/hard_mean"] == 10.0


def test_nats_that_nobody_measured_are_no_zero() -> None:
    with pytest.raises(ValueError, match="log-probs of the start for every turn"):
        view_rewards([turn(1.0)], options(reward_kl_coef=0.1))


def in_session(
    name: str, outcome: float | None, start: str = "task", past: tuple[PastSession, ...] = ()
) -> RewardFacts:
    session = SessionOutcome(outcome=outcome, start=start, past=past)
    reward = None if outcome is None else as_reward(outcome)
    return replace(turn(reward, prompt=name), session_id=name, session=session)


SESSIONS = {"reward_outcome": "only", "reward_baseline": "session"}


def test_all_turns_of_a_session_share_what_it_gained_over_others_of_its_task() -> None:
    past = (
        PastSession(session_id="c", version=1, outcome=0.0),
        PastSession(session_id="a", version=1, outcome=1.0),  # of the batch: not counted twice
    )
    facts = [
        in_session("a", 1.0, past=past),
        in_session("a", 1.0, past=past),
        in_session("b", 0.0, past=past),
        in_session("alone", 1.0, "another task"),
        in_session("unknown", None),
    ]
    rewards = [1.0, -1.0, -1.0]  # a, b, c: each once, however many turns it has
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    found = view_rewards(facts, options(**SESSIONS)).advantages
    expected = [(1.0 - mean) / (std + 1e-6)] * 2 + [(-1.0 - mean) / (std + 1e-6), 0.0, 0.0]
    assert found == pytest.approx(expected)
    plain = view_rewards(facts, options(**SESSIONS, divide_by_std=False)).advantages
    assert plain == pytest.approx([4 / 3, 4 / 3, -2 / 3, 0.0, 0.0])
    metrics = view_rewards(facts, options(**SESSIONS)).metrics
    assert metrics["reward/compared_frac"] == 3 / 4


def test_no_session_is_compared_without_an_outcome() -> None:
    assert view_rewards([in_session("a", None)], options(**SESSIONS)).advantages == [0.0]
    metrics = view_rewards([in_session("a", None)], options(**SESSIONS)).metrics
    assert math.isnan(metrics["reward/compared_frac"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_baseline": "session"}, "set reward_outcome"),
        ({"reward_baseline": "session", "reward_outcome": "add"}, "set reward_outcome"),
        ({**SESSIONS, "length_penalty": "uniform"}, "unset length_penalty"),
        ({**SESSIONS, "reward_best_of": 2}, "unset reward_best_of"),
        ({**SESSIONS, "mix": "replace", "pass_rate_threshold": 0.5}, "unset mix"),
        ({**SESSIONS, "pass_rate_threshold": 0.5}, "unset pass_rate_threshold"),
        ({"reward_outcome": "only", "reward_coef": 0.0}, "set reward_coef above 0"),
    ],
)
def test_what_outcomes_do_not_go_with_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        options(**values)


def test_lengths_of_right_and_wrong_answers():
    lengths = torch.tensor([0, 10, 20, 100])
    correct = torch.tensor([float("nan"), 1.0, 1.0, 0.0])
    metrics = length_metrics(lengths, correct)
    assert metrics["length/mean"] == 32.5
    assert (metrics["length/min"], metrics["length/max"], metrics["length/p50"]) == (0, 100, 15)
    assert metrics["length/empty_frac"] == 0.25
    assert metrics["length/wrong_minus_correct"] == pytest.approx(85.0)


def test_what_there_is_none_of_is_nan_not_zero():
    metrics = length_metrics(torch.zeros(0), torch.zeros(0))
    assert all(math.isnan(value) for value in metrics.values())
    assert math.isnan(length_metrics(torch.ones(1), torch.ones(1))["length/wrong_mean"])
