"""The entry points that slime's trainer loads by path, with slime's signatures.

    --custom-advantage-function-path  trainer.slime.hooks.advantage_hook
    --custom-loss-function-path       trainer.slime.hooks.loss_hook     with --loss-type custom_loss
    --custom-tis-function-path        trainer.slime.hooks.tis_hook      with --loss-type policy_loss

and, if hints are practised, for steps at a smaller rate:

    --rollout-data-postprocess-path              trainer.slime.hooks.postprocess_hook
    --custom-megatron-before-train-step-hook-path  trainer.slime.hooks.before_step_hook

What they compute is the embedded trainer's: the objectives are the same functions, and so are
their options, which `args.hindsight_config` (RUN/config.toml) names. `plan.py` says what runs
here and which flags go with it.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.config import TrainerConfig
from trainer.slime.advantages.of_rank import prepare
from trainer.slime.batch_metrics import NOTHING
from trainer.slime.correction import correction_weights
from trainer.slime.last_batch import LastBatch
from trainer.slime.loss import micro_batch_loss
from trainer.slime.plan import check_args
from trainer.slime.ranks import MegatronRanks
from trainer.slime.rate import BatchRate, Scheduler

logger = logging.getLogger(__name__)

_RATE = BatchRate()
"""Of the batch that this process trains on."""
_BATCHES: list[LastBatch] = []
"""That batch, for the next one to report on; empty before the first."""


def advantage_hook(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets `advantages` and `returns` of this rank's rows, and metrics of the batch.

    Raises ValueError for arguments or data that would train something else than was configured.
    """
    trainer = _trainer(args)
    check_args(args, trainer)
    ranks = MegatronRanks()
    carriers = rollout_data.get("prompt")
    last = _BATCHES.pop().report(ranks) if _BATCHES else NOTHING
    prepared = prepare(args, rollout_data, trainer, ranks)
    assert carriers, "they were taken out"
    _RATE.note(carriers)
    _BATCHES.append(prepared.batch)
    if ranks.is_first:
        for warning in (*last.warnings, *prepared.warnings):
            logger.warning("%s", warning)
    rollout_data["advantages"] = prepared.advantages
    rollout_data["returns"] = [values.clone() for values in prepared.advantages]
    metrics = prepared.metrics | last.metrics
    taken = metrics.keys() & rollout_data.keys()
    if taken:
        raise ValueError(f"slime's rollout data already have {sorted(taken)}")
    for name, value in metrics.items():
        # slime averages lists over ranks; every rank has the batch's value.
        rollout_data[name] = [value]


def postprocess_hook(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Pipeline stages that see no advantages read the batch's rate here; the last one already has,
    and has taken the carriers out.
    """
    carriers = rollout_data.pop("prompt", None)
    if carriers:
        _RATE.note(carriers)


def before_step_hook(
    args: Any,
    rollout_id: int,
    step_id: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Scheduler,
) -> None:
    """Sets the learning rate of a step."""
    _RATE.apply(opt_param_scheduler)


def loss_hook(
    args: Any,
    batch: dict[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The configured objective's loss of one micro-batch; `logits` [1, T, v] float32.

    slime's own reduction is not used: turns are counted, not rows.
    """
    return micro_batch_loss(args, batch, logits, MegatronRanks())


def tis_hook(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's `pg_loss` per token times the weights of rollout correction, and the masks that it
    leaves.
    """
    weights, masks, metrics = correction_weights(
        train_log_probs, rollout_log_probs, loss_masks, MegatronRanks()
    )
    return pg_loss * weights, masks, metrics


def _trainer(args: Any) -> TrainerConfig:
    path = getattr(args, "hindsight_config", None)
    if path is None:
        raise ValueError(
            "hindsight_config is not set: write `hindsight_config: RUN/config.toml` into the file "
            "of --custom-config-path"
        )
    return _read(str(path))


@lru_cache(maxsize=1)
def _read(path: str) -> TrainerConfig:
    values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    return TrainerConfig.model_validate(values.get("trainer", {}))
