"""A teacher that is the policy teaches nothing, by any objective; a shift by a position shows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.trainer.step.test_update import largest_difference, weights
from tests.trainer.step.test_update_objectives import CONFIGS, make, taught, teacher  # noqa: F401
from tests.trainer.tiny import random_ids
from trainer.calibration.self_check import self_check
from trainer.errors import DistillationOffError


def sequences() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [random_ids(generator, length) for length in (2, 9, 21)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_objective_passes_and_nothing_changes(folder, teacher, name):  # noqa: F811
    updater = make(folder, teacher, name)
    before, plan = weights(updater), updater.plan
    assert self_check(updater, sequences(), 1e-4) <= 1e-4
    assert largest_difference(before, weights(updater)) == 0.0
    assert updater.plan is plan
    assert not updater.optimizer.state


@pytest.mark.parametrize("name", ["hindsight_opd", "topk_tail", "side_samples"])
def test_a_student_of_another_position_is_noticed(folder, teacher, name):  # noqa: F811
    updater = make(folder, teacher, name)
    original = updater.loss_function

    def shifted(batch, *settings):
        moved = batch.teacher_logprobs_BT.roll(1, dims=1).nan_to_num(nan=-1.0)
        support = batch.support
        if support is not None:
            rolled = support.teacher_BTK.roll(1, dims=1)
            support = dataclasses.replace(support, teacher_BTK=rolled)
        wrong = dataclasses.replace(batch, teacher_logprobs_BT=moved, support=support)
        return original(wrong, *settings)

    updater.loss_function = shifted
    with pytest.raises(DistillationOffError, match="own teacher"):
        self_check(updater, sequences(), 1e-4)


@pytest.mark.parametrize("name", ["forward_kl", "sparse_kl", "topk_tail", "hindsight_opd"])
def test_a_dead_distillation_term_is_noticed_after_the_check_too(folder, teacher, name):  # noqa: F811
    """What the check finds of gradients is no answer to whether training has one."""
    updater = make(folder, teacher, name)
    self_check(updater, sequences(), 1e-4)
    for parameter in updater.policy.trainable_parameters():
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(DistillationOffError, match="no gradient"):
        updater.update(taught(1), 0)
