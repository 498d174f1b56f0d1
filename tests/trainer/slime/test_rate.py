"""The rate of a batch's steps on slime, with Megatron's way of setting it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout_bridge.slime.carrier import RowCarrier, build
from tests.trainer.slime.batches import rows_of, samples_of
from tests.trainer.tiny import load, save_model
from trainer.slime import hooks
from trainer.slime.rate import BatchRate


class HalvedEachStep:
    """Sets the rate of every step anew, from the number of steps, as Megatron's scheduler does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self._set()

    def get_lr(self, param_group: dict[str, Any]) -> float:
        return 0.5**self.num_steps

    def step(self) -> None:
        self.num_steps += 1
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)


@pytest.fixture(scope="module")
def carriers(tmp_path_factory: pytest.TempPathFactory) -> list[RowCarrier]:
    samples = samples_of(load(save_model(tmp_path_factory.mktemp("policy"))).freeze())
    return build(samples, rows_of(samples, merged=True), [0] * len(samples), rate=0.25)


@pytest.fixture
def scheduler() -> HalvedEachStep:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)]
    return HalvedEachStep(torch.optim.SGD(groups, lr=1.0))


def rates(scheduler: HalvedEachStep) -> list[float]:
    return [group["lr"] for group in scheduler.optimizer.param_groups]


def test_each_step_on_a_batch_has_its_factor_and_the_next_batch_its_own(carriers, scheduler):
    rate = BatchRate()
    rate.note(carriers)
    for wanted in (0.25, 0.125):
        rate.apply(scheduler)
        assert rates(scheduler) == [wanted] * 2
        scheduler.step()
    # A step that slime skips does not step the scheduler.
    rate.apply(scheduler)
    rate.apply(scheduler)
    assert rates(scheduler) == [0.0625] * 2
    rate.note([replace(one, batch=replace(one.batch, rate=1.0)) for one in carriers])
    rate.apply(scheduler)
    assert rates(scheduler) == [0.25] * 2


def test_a_batch_that_no_hook_saw_is_refused(scheduler):
    with pytest.raises(ValueError, match="rollout-data-postprocess-path"):
        BatchRate().apply(scheduler)


def test_a_pipeline_stage_without_advantages_reads_it_from_the_rows(carriers, scheduler):
    data = {"prompt": list(carriers), "tokens": []}
    hooks.postprocess_hook(Namespace(), 0, data)
    assert "prompt" not in data
    hooks.postprocess_hook(Namespace(), 0, {"tokens": []})  # the last stage took them out
    hooks.before_step_hook(Namespace(), 0, 0, None, scheduler.optimizer, scheduler)
    assert rates(scheduler) == [0.25] * 2
