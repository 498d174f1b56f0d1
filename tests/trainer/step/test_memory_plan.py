"""The plan of memory, by real passes of a small model."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from records.names import DropReason
from tests.trainer.tiny import load, random_ids, sample
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.restore import restore
from trainer.config import LoraConfig, TrainerConfig
from trainer.errors import StartupError
from trainer.step.memory_plan import GB, MARGIN, MemoryPlan, fitting, measure

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_the_longest_sequence_fills_the_room() -> None:
    plan = MemoryPlan(resident=1 * GB, fixed=0.2 * GB, per_token=1e6, limit=2.2 * GB)
    assert plan.longest == int(1e9 / (MARGIN * 1e6))


def test_what_does_not_fit_is_told_with_what_it_takes() -> None:
    plan = MemoryPlan(resident=1 * GB, fixed=0.2 * GB, per_token=1e6, limit=1.2 * GB)
    with pytest.raises(StartupError, match=r"256 tokens take 1\.49 GB.*lora"):
        _ = plan.longest


def test_passes_are_measured_and_leave_no_gradient(folder) -> None:
    policy = load(folder, lora=LoraConfig(rank=2, alpha=4))
    plan = measure(policy, 4 * GB)
    assert 0.1 * GB < plan.resident < 4 * GB
    # Layers' inputs at least: 2 of 32 numbers.
    assert 2 * 32 * 4 <= plan.per_token < 1e6
    assert all(parameter.grad is None for parameter in policy.trainable_parameters())


def test_without_the_key_nothing_is_measured(folder) -> None:
    config = TrainerConfig()
    assert fitting(config, load(folder)) == (config, None)


def test_micro_batches_are_made_to_fit_and_what_is_longer_is_dropped(folder, tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "checkpoints", str(folder), 0)
    manifest = checkpoints.open()[-1]

    def opened(memory_gb: float):
        values = {"memory_gb": memory_gb, "lora": LoraConfig(rank=2, alpha=4)}
        config = TrainerConfig(**values, micro_batch_tokens=10**7)
        return restore(config, checkpoints, manifest)

    plan = measure(load(folder, lora=LoraConfig(rank=2, alpha=4)), 4 * GB)
    tight, roomy = opened(plan.resident / GB + 0.3), opened(1000.0)
    assert roomy.config.micro_batch_tokens == 10**7
    assert tight.longest is not None
    assert tight.config.micro_batch_tokens == tight.longest < 10**7
    tight.longest = 40
    generator = np.random.default_rng(0)
    short, long = (
        sample(random_ids(generator, length), random_ids(generator, 4), turn_id=str(length))
        for length in (30, 60)
    )
    assert tight.unusable(short) is None
    assert tight.unusable(long) is DropReason.BEYOND_TRAINER_MEMORY
    assert roomy.unusable(long) is None
    assert "turn 60 has 64 tokens" in caplog.text


def test_a_model_that_does_not_fit_ends_the_start(folder, tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", str(folder), 0)
    config = TrainerConfig(memory_gb=0.05)
    with pytest.raises(StartupError, match=r"trainer\.memory_gb = 0\.05 is too little"):
        restore(config, checkpoints, checkpoints.open()[-1])


def test_the_peak_is_that_of_the_work() -> None:
    from trainer.step.memory_plan import _process_gauge

    used, peak = _process_gauge(lambda: torch.ones(64 * 2**20).sum())
    assert 200 * 2**20 < peak - used < 400 * 2**20
