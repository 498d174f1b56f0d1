"""Our hooks in slime over several processes: the same gradients as the embedded trainer in one.

Tensor ranks hold parts of the vocabulary, context ranks parts of each sequence, data ranks rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slime.conftest import REPOSITORY, python_path
from tests.trainer.slime.batches import SIDE, rows_of, samples_of, with_drawn
from tests.trainer.tiny import load, save_model
from trainer.config import TrainerConfig
from trainer.step.update import Updater

# Several processes that each import slime and Megatron.
pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]
TOLERANCE = 1e-5
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "vocabulary": ({"tensor": 2}, {"objective": {"name": "forward_kl_topk", "topk": 8}}, {}),
    "vocabulary_entropy": ({"tensor": 2}, {"beta_entropy": 0.01}, {"temperatures": [1.0, 0.6]}),
    "context": (
        {"context": 2},
        {"objective": {"name": "topk_tail_reverse_kl", "topk": 8}},
        {"merged": True},
    ),
    "context_sequence_weights": (
        {"context": 2},
        {
            "objective": {"surrogate": "gspo"},
            "correction": {"rejections": [{"statistic": "geometric", "upper": 1.1}]},
        },
        {"merged": True},
    ),
    "context_policy_loss": (
        {"context": 2},
        {"beta_kl": 0.0, "correction": {"importance_level": "sequence"}},
        {"merged": True, "loss_type": "policy_loss"},
    ),
    "data": (
        {"data": 2},
        {"objective": {"normalise": True, "reward_coef": 1.0, "reward_baseline": "step"}},
        {"merged": True},
    ),
    "data_two_steps": ({"data": 2}, {"epochs_per_batch": 2}, {}),
    "context_two_steps": ({"context": 2}, {"epochs_per_batch": 2}, {"merged": True}),
    "vocabulary_side_samples": ({"tensor": 2}, SIDE["side_samples"], {}),
    "context_side_samples": (
        {"context": 2},
        {"epochs_per_batch": 2, **SIDE["side_samples"]},
        {"merged": True},
    ),
    "data_finite_cache": ({"data": 2}, SIDE["finite_cache"], {"merged": True}),
}


def in_slime(folder: Path, slime_root: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of the job found."""
    (folder / "job.json").write_text(json.dumps(job))
    world = 1
    for size in job["sizes"].values():
        world *= size
    environment = {**os.environ, "PYTHONPATH": python_path(slime_root), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.slime.rank_worker", folder, str(rank), slime_root],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=800)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(
        output[-4000:] for output in outputs
    )
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_take_the_embedded_trainers_step(name, slime_root, tmp_path):
    sizes, values, options = CASES[name]
    policy_folder = save_model(tmp_path / "policy")
    start_folder = save_model(tmp_path / "start", seed=5)
    job = {
        "sizes": sizes,
        "trainer": {"tensorboard": False, **values},
        "policy": str(policy_folder),
        "start": str(start_folder),
        "merged": False,
        "temperatures": [1.0],
        "loss_type": "custom_loss",
        **options,
    }
    found = in_slime(tmp_path, slime_root, job)
    config = TrainerConfig.model_validate(job["trainer"])
    policy = load(policy_folder)
    samples = samples_of(policy, temperatures=job["temperatures"])
    if config.side_source is not None:
        samples = with_drawn(samples, load(start_folder), config)
    policy.model.zero_grad(set_to_none=True)
    start = load(start_folder).freeze() if config.beta_kl > 0 else None
    updater = Updater(policy, start, config)
    gaps = [index % 3 for index in range(len(samples))]
    rows = rows_of(samples, merged=job["merged"])
    totals = updater.accumulate(updater.preparation.prepare(samples, gaps, rows))
    # Tensor ranks hold parts of one gradient; the others are averaged by Megatron.
    copies = 1 if "tensor" in sizes else len(found)
    # Nothing steps here: gradients of equal steps add up.
    copies *= config.epochs_per_batch
    for key, parameter in policy.model.named_parameters():
        together = sum(one["gradients"][key] for one in found) / copies
        assert parameter.grad is not None
        torch.testing.assert_close(together, parameter.grad, atol=TOLERANCE, rtol=0)
    metrics = totals.statistics()
    for key in ("loss", "pg_loss", "kl_loss", "opd/kl_loss", "entropy_loss"):
        if key in metrics and job["loss_type"] == "custom_loss":
            for one in found:
                assert one["metrics"][key] == pytest.approx(metrics[key], abs=TOLERANCE), key
