import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.objectives.rollout_correction.worked import MASK, ROLLOUT, TRAIN
from trainer.objectives.rollout_correction.config import PRESET_NAMES, preset
from trainer.objectives.rollout_correction.correct import correct_rollout
from trainer.objectives.rollout_correction.settings import (
    RolloutCorrectionSettings,
    rejection_rule,
)

NAN, INF = float("nan"), float("inf")


def same_metrics(first, second, *, apart=()):
    assert first.keys() == second.keys()
    for name, value in first.items():
        if name not in apart:
            assert value == pytest.approx(second[name], rel=1e-7, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("name", PRESET_NAMES)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_what_lies_at_mask_0_is_never_seen(name, garbage):
    hidden = MASK == 0
    train, rollout = TRAIN.masked_fill(hidden, garbage), ROLLOUT.masked_fill(hidden, -garbage)
    clean = correct_rollout(TRAIN, ROLLOUT, MASK, preset(name))
    dirty = correct_rollout(train, rollout, MASK, preset(name))
    assert torch.equal(clean.mask_BT, dirty.mask_BT)
    if clean.weights_BT is not None:
        assert dirty.weights_BT is not None
        assert torch.equal(clean.weights_BT, dirty.weights_BT)
        assert clean.weights_BT[hidden].eq(0).all()
    assert clean.metrics == dirty.metrics


def test_weights_are_detached():
    train = TRAIN.clone().requires_grad_()
    result = correct_rollout(train, ROLLOUT, MASK, preset("pure_is"))
    assert result.weights_BT is not None
    assert not result.weights_BT.requires_grad


def test_bypass_applies_no_weights_but_measures_them():
    result = correct_rollout(TRAIN, ROLLOUT, MASK, preset("ppo_is_bypass"))
    assert result.weights_BT is None
    assert result.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.083333, abs=1e-6)


@pytest.mark.parametrize(
    ("ratios", "problems"),
    [
        ([5.0, 5.0, 5.0, 5.0], ["mean importance weight far from 1"]),
        (
            [0.01] * 15 + [16.0],
            ["weights concentrate on few tokens", "importance weights spread too widely"],
        ),
    ],
)
def test_a_cap_hides_no_weights_that_run_away(ratios, problems):
    rollout = torch.full((1, len(ratios)), -9.0)
    train = rollout + torch.tensor([ratios]).log()
    settings = RolloutCorrectionSettings(importance_level="token", importance_upper=2.0)
    result = correct_rollout(train, rollout, torch.ones_like(train), settings)
    assert result.metrics["rollout_corr/rollout_is_mean"] <= 2.0
    for problem in problems:
        assert any(line.endswith(problem) for line in result.warnings), problem


def test_equal_policies_are_left_alone():
    for name in PRESET_NAMES:
        result = correct_rollout(ROLLOUT, ROLLOUT, MASK, preset(name))
        assert torch.equal(result.mask_BT, MASK)
        assert result.warnings == ()
        if result.weights_BT is not None:
            assert torch.equal(result.weights_BT, MASK)


def test_a_turn_is_corrected_as_if_it_were_a_row():
    settings = RolloutCorrectionSettings(
        importance_level="sequence",
        rejections=(rejection_rule("geometric", 1.5), rejection_rule("seq_max_k2", 0.5)),
        veto_threshold=0.3,
        batch_normalize=True,
    )
    turns = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 4, -1, -1]])
    merged = correct_rollout(TRAIN, ROLLOUT, MASK, settings, turns)
    picks = [(0, [0, 1]), (0, [2, 3]), (1, [0, 1, 2]), (2, [0]), (2, [1])]
    shape = (len(picks), 3)
    train, rollout, mask = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    train, rollout, mask = train.double(), rollout.double(), mask.double()
    for row, (source, columns) in enumerate(picks):
        width = len(columns)
        train[row, :width] = TRAIN[source, columns]
        rollout[row, :width] = ROLLOUT[source, columns]
        mask[row, :width] = 1.0
    apart = correct_rollout(train, rollout, mask, settings)
    same_metrics(merged.metrics, apart.metrics)
    assert merged.weights_BT is not None
    assert apart.weights_BT is not None
    for row, (source, columns) in enumerate(picks):
        width = len(columns)
        torch.testing.assert_close(
            merged.weights_BT[source, columns], apart.weights_BT[row, :width]
        )
        assert torch.equal(merged.mask_BT[source, columns], apart.mask_BT[row, :width])


def test_turn_ids_may_count_per_row():
    settings = preset("seq_is")
    per_row = torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1], [0, 1, -1, -1]])
    per_batch = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 4, -1, -1]])
    first = correct_rollout(TRAIN, ROLLOUT, MASK, settings, per_row)
    second = correct_rollout(TRAIN, ROLLOUT, MASK, settings, per_batch)
    assert first.metrics == second.metrics


def test_empty_rows_count_nowhere():
    settings = RolloutCorrectionSettings(
        rejections=(rejection_rule("sequence", 2.0),), veto_threshold=0.3, batch_normalize=True
    )
    full = correct_rollout(TRAIN, ROLLOUT, MASK, settings)
    pad = torch.full((2, 4), 5.0, dtype=torch.float64)
    more = correct_rollout(
        torch.cat([TRAIN, pad]), torch.cat([ROLLOUT, -pad]), torch.cat([MASK, 0 * pad]), settings
    )
    same_metrics(full.metrics, more.metrics)


def test_incomparable_tokens_weigh_1_and_are_measured_nowhere():
    settings = RolloutCorrectionSettings(
        importance_level="sequence", rejections=(rejection_rule("sequence", 1.5),)
    )
    rollout, mask = ROLLOUT.clone(), MASK.clone()
    rollout[1] = NAN
    rollout[2, 1] = NAN
    mask[1], mask[2, 1] = 0, 0
    result = correct_rollout(TRAIN, rollout, MASK, settings)
    without = correct_rollout(TRAIN, rollout, mask, settings)
    assert result.weights_BT is not None
    torch.testing.assert_close(result.weights_BT[1], MASK[1])
    assert result.weights_BT[2].tolist() == pytest.approx([1.1, 1.0, 0.0, 0.0])
    assert result.mask_BT.sum(dim=-1).tolist() == [0, 3, 2]
    assert result.metrics["rollout_corr/incomparable_tokens"] == 4
    same_metrics(result.metrics, without.metrics, apart=["rollout_corr/incomparable_tokens"])


def test_nothing_comparable_measures_nothing():
    result = correct_rollout(TRAIN, torch.full_like(ROLLOUT, NAN), MASK, preset("seq_is_rs"))
    assert result.weights_BT is not None
    assert torch.equal(result.weights_BT, MASK)
    assert torch.equal(result.mask_BT, MASK)
    assert math.isnan(result.metrics["rollout_corr/kl"])
    assert math.isnan(result.metrics["rollout_corr/rollout_is_mean"])
    assert result.warnings == ()


def test_a_veto_takes_what_is_not_finite():
    settings = RolloutCorrectionSettings(importance_level=None, veto_threshold=1e-4)
    rollout, train = ROLLOUT.clone(), TRAIN.clone()
    rollout[1, 0] = NAN
    train[2, 1] = -INF
    result = correct_rollout(train, rollout, MASK, settings)
    assert result.mask_BT.sum(dim=-1).tolist() == [4, 0, 0]
    assert result.metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(2 / 3)


def test_guards_without_a_veto():
    rollout, train = ROLLOUT.clone(), TRAIN.clone()
    train[0, 1] = NAN
    rollout[1, 2] = -INF
    result = correct_rollout(train, rollout, MASK, preset("token_is"))
    assert result.mask_BT.tolist() == [[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert result.weights_BT is not None
    assert torch.equal(result.weights_BT > 0, result.mask_BT > 0)
    assert result.metrics["guard/nonfinite_tokens"] == 1
    assert result.metrics["guard/nonfinite_rollout_sequences"] == 1
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_an_empty_batch_is_reported():
    result = correct_rollout(TRAIN, ROLLOUT, 0 * MASK, preset("seq_is_rs"))
    assert result.metrics == {"guard/empty_batch": 1.0}
    assert result.weights_BT is not None
    assert result.weights_BT.eq(0).all()
    vetoed = correct_rollout(TRAIN, ROLLOUT, MASK, RolloutCorrectionSettings(veto_threshold=100.0))
    assert vetoed.mask_BT.sum() == 0
    assert vetoed.metrics["guard/empty_batch"] == 1.0


def test_extreme_ratios_stay_finite():
    train = TRAIN.clone()
    train[0, 0], train[1, 1], train[2, 0] = 1e4, -1e4, 900.0
    for name in PRESET_NAMES:
        result = correct_rollout(train, ROLLOUT, MASK, preset(name))
        assert all(math.isfinite(value) for value in result.metrics.values())
        if result.weights_BT is not None:
            assert torch.isfinite(result.weights_BT).all()


def test_clamping_the_sum_or_its_terms():
    train = torch.tensor([[29.0, -11.0]])
    rollout, mask = torch.full((1, 2), -1.0), torch.ones(1, 2)
    # x = 30 and -10: the sum is 20, of clamped terms 10.
    rule = (rejection_rule("sequence", math.exp(15.0)),)
    for before, kept in ((False, 0), (True, 2)):
        settings = RolloutCorrectionSettings(rejections=rule, clamp_before_sum=before)
        assert correct_rollout(train, rollout, mask, settings).mask_BT.sum() == kept


def test_tokens_after_tool_output_have_their_own_metrics():
    after_tool = torch.zeros_like(MASK)
    after_tool[0] = 1.0
    result = correct_rollout(TRAIN, ROLLOUT, MASK, preset("disabled"), after_tool_BT=after_tool)
    metrics = result.metrics
    assert metrics["rollout_corr/post_tool/mean"] == pytest.approx(7.5 / 4)
    assert metrics["rollout_corr/post_tool/p99"] == pytest.approx(4.0)
    assert metrics["rollout_corr/post_tool/token_fraction"] == pytest.approx(4 / 9)
    assert metrics["rollout_corr/other/max"] == pytest.approx(1.1)
    none = correct_rollout(TRAIN, ROLLOUT, MASK, preset("disabled"), after_tool_BT=0 * MASK)
    assert math.isnan(none.metrics["rollout_corr/post_tool/mean"])


def test_half_precision_is_compared_in_float32():
    result = correct_rollout(TRAIN.bfloat16(), ROLLOUT.bfloat16(), MASK.float(), preset("token_is"))
    assert result.weights_BT is not None
    assert result.weights_BT.dtype == torch.float32


def test_bad_input():
    with pytest.raises(ValueError, match="mask has shape"):
        correct_rollout(TRAIN, ROLLOUT, MASK[:, :3], preset("token_is"))
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        correct_rollout(TRAIN[0], ROLLOUT[0], MASK[0], preset("token_is"))
    with pytest.raises(ValueError, match="no turn id"):
        correct_rollout(TRAIN, ROLLOUT, MASK, preset("token_is"), torch.full((3, 4), -1))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_behind_a_tool_result_have_a_bound_of_their_own(level):
    rollout = torch.full((2, 2), -9.0)
    train = rollout + torch.tensor([[3.0, 1.1], [3.0, 1.1]]).log()
    after_tool = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    settings = RolloutCorrectionSettings(
        importance_level=level, importance_upper=2.0, post_tool_upper=1.2
    )
    result = correct_rollout(
        train, rollout, torch.ones_like(train), settings, after_tool_BT=after_tool
    )
    wanted = [[2.0, 1.1], [1.2, 1.1]] if level == "token" else [[2.0, 2.0], [1.2, 1.2]]
    torch.testing.assert_close(result.weights_BT, torch.tensor(wanted))
    share = result.metrics["rollout_corr/post_tool/bounded_fraction"]
    assert share == (0.5 if level == "token" else 1.0)


def test_two_bounds_zero_weights_beyond_the_one_behind_a_tool_result():
    rollout = torch.full((1, 2), -9.0)
    train = rollout + torch.tensor([[1.5, 1.1]]).log()
    settings = RolloutCorrectionSettings(
        importance_level="token", importance_lower=0.5, post_tool_upper=1.2
    )
    ones = torch.ones_like(train)
    result = correct_rollout(train, rollout, ones, settings, after_tool_BT=ones)
    torch.testing.assert_close(result.weights_BT, torch.tensor([[0.0, 1.1]]))


@pytest.mark.parametrize(
    "values",
    [
        {"post_tool_upper": 3.0},
        {"post_tool_upper": 0.5},
        {"post_tool_upper": 1.5, "is_mask_mode": True},
        {"post_tool_upper": 1.5, "importance_level": None},
        {"post_tool_upper": 1.5, "mode": "bypass"},
    ],
)
def test_a_bound_behind_a_tool_result_that_cannot_act_is_refused(values):
    with pytest.raises(ValueError, match="post_tool_upper"):
        RolloutCorrectionSettings(**{"importance_level": "token", **values})


@settings(max_examples=60)
@given(
    turns=st.lists(
        st.tuples(st.booleans(), st.lists(st.floats(-4, 4), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    level=st.sampled_from(["token", "sequence"]),
    bound=st.floats(0.6, 2.0),
)
def test_a_bound_behind_tool_results_acts_there_and_nowhere_else(turns, level, bound):
    rows = [torch.tensor(ratios, dtype=torch.float64) for _, ratios in turns]
    train = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in rows], batch_first=True)
    after_tool = torch.tensor([float(behind) for behind, _ in turns]).unsqueeze(-1) * mask

    def weights(**more):
        chosen = RolloutCorrectionSettings(importance_level=level, **more)
        found = correct_rollout(train, 0 * train, mask, chosen, after_tool_BT=after_tool)
        return found.weights_BT

    plain, bounded = weights(), weights(post_tool_upper=bound)
    torch.testing.assert_close(
        bounded, torch.where(after_tool > 0, plain.clamp(max=bound), plain), rtol=0, atol=0
    )
