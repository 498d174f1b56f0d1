"""What the next batch reports of a batch: the embedded trainer's figures, and once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.trainer.slime.batches import rows_of, samples_of
from tests.trainer.slime.one_process import OneProcess, arguments, backward, rollout_data
from tests.trainer.tiny import load, save_model
from trainer.batch.token_figures import QUANTILE_KEYS
from trainer.config import TrainerConfig
from trainer.slime.advantages.of_rank import prepare
from trainer.slime.batch_metrics import BatchReport
from trainer.slime.last_batch import PREFIX
from trainer.step.update import Updater

EXTREMES = ("opd/loss_min", "opd/loss_max", "ratio_max")


class TwoRanks(OneProcess):
    """Another data rank has seen what this one has, and the loss twice as large."""

    def of_all(self, own: Any) -> list[Any]:
        other = type(own)(epoch=own.epoch, ratios=[2 * one for one in own.ratios])
        other.ranges = {name: (2 * low, 2 * high) for name, (low, high) in own.ranges.items()}
        return [own, other]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("policy"))


def config_of(**values: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"tensorboard": False, "beta_kl": 0.0} | values)


def said_of(
    folder, samples, config: TrainerConfig, ranks: OneProcess | None = None
) -> tuple[BatchReport, dict[str, float]]:
    """What the next batch says of a batch of these, and what the batch itself said."""
    policy, rows = load(folder), rows_of(samples, merged=True)
    data = rollout_data(samples, rows, policy.model, epochs=config.epochs_per_batch)
    prepared = prepare(arguments(), data, config, OneProcess())
    for first in range(0, config.epochs_per_batch * len(rows), len(rows)):
        backward(data, policy.model, [[first + 2, first], [first + 1]])
    return prepared.batch.report(ranks or OneProcess()), prepared.metrics


@pytest.mark.parametrize("name", ["hindsight_opd", "supervised_opd", "forward_kl_topk"])
def test_extremes_are_the_embedded_trainers(name: str, folder) -> None:
    options = {"name": name, "topk": 8} if name == "forward_kl_topk" else {"name": name}
    config = config_of(objective=options)
    samples = samples_of(load(folder).freeze())
    report, own = said_of(folder, samples, config)
    wanted = Updater(load(folder), None, config).update(samples, 0).metrics
    assert report.metrics.keys() >= {f"{PREFIX}{key}" for key in EXTREMES}
    for key in EXTREMES:
        assert report.metrics[f"{PREFIX}{key}"] == pytest.approx(wanted[key], abs=1e-5), key
    assert wanted["opd/loss_max"] > wanted["opd/loss_min"]
    for key in QUANTILE_KEYS:
        assert own[key] == pytest.approx(wanted[key], abs=1e-5), key


def test_turns_of_every_temperature_are_compared_with_their_engine(folder) -> None:
    config = config_of(correction={"rejections": [{"statistic": "token", "upper": 1.3}]})
    samples = [
        replace(one, rollout_logprobs=one.rollout_logprobs - 0.5)
        for one in samples_of(load(folder).freeze(), temperatures=(0.6,))
    ]
    report, before = said_of(folder, samples, config)
    update = Updater(load(folder), None, config).update(samples, 0)
    names = [key for key in update.metrics if key.startswith("rollout_corr/")]
    assert len(names) > 10
    for key in names:
        assert report.metrics[f"{PREFIX}{key}"] == pytest.approx(
            update.metrics[key], abs=1e-5, rel=1e-4, nan_ok=True
        ), key
    assert report.metrics[f"{PREFIX}rollout_corr/kl"] != pytest.approx(0.0, abs=1e-4)
    assert before["rollout_corr/kl"] != before["rollout_corr/kl"]  # not known before the step
    assert report.warnings == tuple(f"the batch before: {one}" for one in update.warnings)
    assert report.warnings


def test_several_steps_report_the_extremes_of_the_last_and_the_ratios_of_the_first(folder) -> None:
    samples = samples_of(load(folder).freeze(), temperatures=(1.0, 0.6))
    # Nothing steps between the passes here, so both have the same extremes.
    once, _ = said_of(folder, samples, config_of())
    twice, _ = said_of(folder, samples, config_of(epochs_per_batch=2))
    assert twice.metrics == pytest.approx(once.metrics, abs=1e-6, nan_ok=True)


def test_ranks_are_joined(folder) -> None:
    samples = samples_of(load(folder).freeze())
    one, _ = said_of(folder, samples, config_of())
    two, _ = said_of(folder, samples, config_of(), TwoRanks())
    low, high, ratio = (f"{PREFIX}{key}" for key in EXTREMES)
    assert two.metrics[ratio] == 2 * one.metrics[ratio]
    for key in (low, high):
        assert abs(two.metrics[key]) == 2 * abs(one.metrics[key])


def test_nothing_is_made_up_for_a_loss_that_calls_no_hook(folder) -> None:
    samples = samples_of(load(folder).freeze())
    data = rollout_data(samples, rows_of(samples, merged=True), load(folder).model)
    report = prepare(arguments(), data, config_of(), OneProcess()).batch.report(OneProcess())
    assert report == BatchReport(metrics={}, warnings=())


def test_nothing_is_said_of_a_batch_without_turns(folder) -> None:
    policy = load(folder)
    rows = rows_of(samples_of(policy.freeze())[:1], merged=True)
    empty = [type(rows[0])(ids=rows[0].ids, spans=())]
    data = rollout_data([], empty, load(folder).model)
    report = prepare(arguments(), data, config_of(), OneProcess()).batch.report(OneProcess())
    assert report == BatchReport(metrics={}, warnings=())
