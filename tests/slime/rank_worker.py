"""One rank of a slime step: `python -m tests.slime.rank_worker FOLDER RANK SLIME_ROOT`.

FOLDER/job.json: sizes of Megatron's groups, the trainer's configuration, whether turns are merged,
the policy's folder. What this rank found goes to FOLDER/rank-N.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from rollout_bridge.merging import PackedSequence
from tests.slime.training import arguments, prepare_process, run_step, train_data
from tests.trainer.slime.batches import rows_of, samples_of, with_drawn
from tests.trainer.tiny import load
from trainer.config import TrainerConfig


def main(folder: Path, rank: int, slime_root: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    prepare_process(slime_root, folder / "store", rank=rank, **job["sizes"])
    trainer = TrainerConfig.model_validate(job["trainer"])
    policy = load(Path(job["policy"]))
    samples = samples_of(policy, temperatures=job["temperatures"])
    if trainer.side_source is not None:
        samples = with_drawn(samples, load(Path(job["start"])), trainer)
    rows = rows_of(samples, merged=job["merged"])
    padding = PackedSequence(ids=np.zeros(2, dtype=np.int32), spans=())
    rows += [padding] * (-len(rows) % job["sizes"].get("data", 1))
    gaps = [index % 3 for index in range(len(samples))]
    own = folder / f"run-{rank}"
    own.mkdir()
    args = arguments(trainer, own, loss_type=job["loss_type"], max_tokens=40)
    policy.model.zero_grad(set_to_none=True)
    start = load(Path(job["start"])).freeze().model if trainer.beta_kl > 0 else None
    data = train_data(args, samples, rows, gaps, trainer.epochs_per_batch)
    result = run_step(args, data, policy.model, start)
    found = {
        "gradients": result.gradients,
        "metrics": result.metrics,
        "num_micro_batches": result.num_micro_batches,
    }
    torch.save(found, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
