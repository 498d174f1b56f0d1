"""What the rollout side hands over, through slime's own data path and loss with our hooks."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from records.types import ReadySample
from rollout_bridge.slime.probes import Probe
from rollout_bridge.slime.rows import train_rows
from tests.slime.training import StepResult, arguments, prepare_process, run_step
from tests.trainer.slime.batches import samples_of, with_lessons
from tests.trainer.tiny import load, save_model
from trainer.calibration.calibrate import own_logprobs
from trainer.config import TrainerConfig
from trainer.errors import CalibrationError
from trainer.step.update import Updater

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

CONFIGS: dict[str, dict[str, Any]] = {
    "custom_loss": {"beta_kl": 0.0},
    "token_mean": {"beta_kl": 0.0, "aggregation": "token-mean"},
    "rows_mean": {"beta_kl": 0.0, "aggregation": "seq-mean-turn-mean"},
}


@pytest.fixture(scope="module", autouse=True)
def slime_process(slime_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    prepare_process(slime_root, tmp_path_factory.mktemp("gloo") / "store")
    yield
    from megatron.core import mpu

    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def samples(model_folder: Path) -> list[ReadySample]:
    return samples_of(load(model_folder).freeze())


def stepped(
    name: str, samples: list[ReadySample], min_rows: int, model_folder: Path, folder: Path
) -> StepResult:
    """One step of slime on what the rollout function and the convert hook make of `samples`."""
    from rollout_bridge.slime.rollout import convert_samples, row_sample

    config = TrainerConfig.model_validate({"tensorboard": False} | CONFIGS[name])
    args = arguments(config, folder, max_tokens=40)
    gaps = [index % 3 for index in range(len(samples))]
    rows = train_rows(samples, gaps, min_rows=min_rows)
    data = convert_samples(args, [row_sample(row, index) for index, row in enumerate(rows)])
    assert args.global_batch_size == len(rows)
    return run_step(args, data, load(model_folder).model, None)


@pytest.mark.parametrize("rate", [None, 1.0, 0.5], ids=["turns", "lessons", "after a fall"])
def test_four_steps_on_a_batch_end_at_the_embedded_trainers_weights(
    rate: float | None, samples: list[ReadySample], model_folder: Path, tmp_path: Path
) -> None:
    from rollout_bridge.slime.rollout import convert_samples, row_sample

    config = TrainerConfig.model_validate(
        {"tensorboard": False, "beta_kl": 0.0, "epochs_per_batch": 4}
        | {"learning_rate": 1e-2, "adam_eps": 1e-3}
    )
    args = arguments(config, tmp_path, max_tokens=40, rehearses=rate is not None)
    samples = samples if rate is None else with_lessons(samples)
    rows = train_rows(samples, [0] * len(samples), min_rows=4, epochs=4, rate=rate or 1.0)
    data = convert_samples(args, [row_sample(row, index) for index, row in enumerate(rows)])
    assert args.global_batch_size == len(rows) == 4
    assert data["rollout_ids"] == list(range(16))
    policy, twin, start = load(model_folder), load(model_folder), load(model_folder)
    result = run_step(args, data, policy.model, None, config)
    assert len(result.advantages) == 16
    Updater(twin, None, config).update(samples, 0, rate=rate or 1.0)
    moved = 0.0
    for one, other, was in zip(
        *(model.trainable_parameters() for model in (policy, twin, start)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
        moved = max(moved, float((other - was).detach().abs().max()))
    assert moved > 1e-2


@pytest.mark.parametrize("is_off", [False, True])
def test_probes_of_the_engines_are_compared_with_slimes_forward_pass(
    is_off: bool, samples: list[ReadySample], model_folder: Path, tmp_path: Path
) -> None:
    from rollout_bridge.slime.rollout import convert_samples, row_sample

    config = TrainerConfig.model_validate({"tensorboard": False, "beta_kl": 0.0})
    args = arguments(config, tmp_path, max_tokens=40)
    policy = load(model_folder)
    score = own_logprobs(policy, torch.device("cpu"))
    texts = [np.arange(3, 3 + length, dtype=np.int32) for length in (2, 30)]
    probes = [Probe(ids=ids, logprobs=score(ids) + 0.5 * is_off, bound=0.1) for ids in texts]
    rows = train_rows(
        samples,
        [0] * len(samples),
        min_rows=1,
        probes=probes,
    )
    data = convert_samples(args, [row_sample(row, index) for index, row in enumerate(rows)])
    if is_off:
        with pytest.raises(CalibrationError, match="on average over 30 tokens"):
            run_step(args, data, policy.model, None)
        return
    result = run_step(args, data, policy.model, None)
    assert result.rollout["calibration/mean"] < result.rollout["calibration/max"] < 1e-5
    plain = stepped("custom_loss", samples, 1, model_folder, tmp_path)
    for key, wanted in plain.gradients.items():
        torch.testing.assert_close(result.gradients[key], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_rows_change_neither_loss_nor_gradient(
    name: str, samples: list[ReadySample], model_folder: Path, tmp_path: Path
) -> None:
    plain = stepped(name, samples, 1, model_folder, tmp_path)
    padded = stepped(name, samples, 16, model_folder, tmp_path)
    assert max(float(one.abs().max()) for one in plain.gradients.values()) > 1e-4
    for key, wanted in plain.gradients.items():
        torch.testing.assert_close(padded.gradients[key], wanted, atol=1e-6, rtol=1e-5)
    assert padded.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_turns_has_no_gradient(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    result = stepped(name, [], 2, model_folder, tmp_path)
    assert all(float(one.abs().max()) == 0.0 for one in result.gradients.values())
    assert result.metrics["loss"] == 0.0
