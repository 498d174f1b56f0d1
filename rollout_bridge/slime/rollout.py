"""The entry points that slime's rollout process loads by path; only this module imports slime.

    --rollout-function-path                     rollout_bridge.slime.rollout.generate_rollout
    --data-source-path                          rollout_bridge.slime.rollout.HindsightDataSource
    --custom-convert-samples-to-train-data-path rollout_bridge.slime.rollout.convert_samples
    --custom-rollout-log-function-path          rollout_bridge.slime.rollout.log_rollout

Live agents make the turns; a rollout is the next batch of them that is ready to train. One row of
slime's batch is one merged sequence; whatever slime's own keys cannot carry travels in `prompt`
(`slime_carrier`).
"""

# slime hosts this project and is not a dependency: most machines do not have it.
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from slime.observability import logging_utils
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

from rollout_bridge.engine.errors import EngineUnavailable
from rollout_bridge.slime.compat import check_slime
from rollout_bridge.slime.engines import POLICY, router_urls, write_engines
from rollout_bridge.slime.host import TurnHost
from rollout_bridge.slime.probes import Probe
from rollout_bridge.slime.rows import TrainRow, train_rows
from rollout_bridge.slime.settings import SlimeConfigError, is_configured, read_settings

logger = logging.getLogger(__name__)

CARRIER = "hindsight_carrier"
"""Key of a sample's metadata."""


class HindsightDataSource:
    """slime's data source of a run: hands turns over, and follows slime's checkpoints.

    If slime was given no run, it is an empty source.
    """

    def __init__(self, args: Any) -> None:
        """Raises SlimeConfigError or UnknownSlimeError if samples would be lost."""
        self._args = args
        self._host: TurnHost | None = None
        self._to_calibrate: str | None = None
        """The router of engines that were not compared with the trainer yet; None: no more."""
        if not is_configured(args):
            return
        check_slime()
        self._settings = read_settings(args)
        urls = router_urls(args)
        if urls:
            path = write_engines(self._settings.run_folder, urls)
            logger.info("engines %s written to %s", urls, path)
        self._to_calibrate = urls.get(POLICY)
        shape = None
        if getattr(args, "use_rollout_routing_replay", False):
            shape = (int(args.num_layers), int(args.moe_router_topk))
        self._experts_shape = shape
        self._host = TurnHost(self._settings, needs_experts=shape is not None)

    def next_rows(self, rollout_id: int) -> tuple[list[TrainRow], dict[str, float]]:
        """The rows of the next step, and metrics about them. See `TurnHost.next_batch`."""
        # The first thing of all: slime has given the engines the weights that it starts with.
        probes = self._probes()
        batch = self._running().next_batch(rollout_id)
        started = time.monotonic()
        rows = train_rows(
            batch.samples,
            batch.version_gaps,
            min_rows=self._settings.min_rows,
            epochs=self._settings.epochs_per_batch,
            rate=batch.rate,
            step=rollout_id,
            experts_shape=self._experts_shape,
            probes=probes,
        )
        return rows, batch.metrics | {
            "handover/rows": sum(not row.is_padding for row in rows),
            "handover/padding_rows": sum(row.is_padding for row in rows),
            "handover/tokens": sum(len(row.ids) for row in rows),
            "handover/merge_s": time.monotonic() - started,
            "handover/probes": len(probes),
        }

    def _probes(self) -> list[Probe]:
        """What the engines make of the calibration's texts, once in a job's life.

        Raises ValueError for a renderer that does not load, EngineProtocolError and EngineRejected.
        """
        url, self._to_calibrate = self._to_calibrate, None
        if url is None:
            return []
        if self._experts_shape is not None:
            logger.warning("engines are not calibrated: scores come without the experts to replay")
            return []
        try:
            return self._running().probes(url)
        except EngineUnavailable as error:
            # A job takes long to start; one whose engines give wrong answers ends.
            logger.warning("engines are not calibrated: %s", error)
            return []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Nothing: turns leave the store only as a step's batch, through `generate_rollout`."""
        if self._host is not None:
            raise RuntimeError(
                "--rollout-function-path: set rollout_bridge.slime.rollout.generate_rollout; turns "
                "are handed over a step at a time"
            )
        return []

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Refused: turns come from agents."""
        raise RuntimeError("turns come from the store; slime cannot add samples to it")

    def save(self, rollout_id: int) -> None:
        """slime has written its checkpoint of `rollout_id`: mark the turns of its steps trained."""
        self._running().checkpointed(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """slime starts with its checkpoint of `rollout_id` (-1: the start weights): turns that were
        handed over later are ready again.
        """
        if self._host is not None:
            self._host.resume(-1 if rollout_id is None else rollout_id)

    def close(self) -> None:
        """Disconnect from the store; leases stay."""
        if self._host is not None:
            self._host.close()

    def __len__(self) -> int:
        """0: live traffic has no length."""
        return 0

    def _running(self) -> TurnHost:
        if self._host is None:
            raise SlimeConfigError(
                "hindsight_config is not set: write `hindsight_config: RUN/config.toml` into the "
                "file of --custom-config-path"
            )
        return self._host


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next batch of ready turns, one sample per merged row.

    Without a configuration (args None) there is no run: the samples of `data_source` pass through
    unchanged. Raises SlimeConfigError for another data source or an evaluation within a run.
    """
    if args is None:
        groups = data_source.get_samples(1)
        return _evaluated(groups) if evaluation else RolloutFnTrainOutput(samples=groups)
    if evaluation:
        raise SlimeConfigError(
            "--eval-interval: leave it out, or give --eval-function-path; this run's agents are "
            "evaluated outside of slime"
        )
    if not isinstance(data_source, HindsightDataSource):
        raise SlimeConfigError(
            "--data-source-path: set rollout_bridge.slime.rollout.HindsightDataSource, which "
            "follows slime's checkpoints"
        )
    rows, metrics = data_source.next_rows(rollout_id)
    samples = [[row_sample(row, index)] for index, row in enumerate(rows)]
    return RolloutFnTrainOutput(samples=samples, metrics=metrics)


def convert_samples(args: Any, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """slime's train data: all rows as often as steps are taken on them, one step after the other.

    slime makes a step of every `args.global_batch_size` distinct rollout ids, so that becomes their
    number in one step, and the rows of each step have ids of their own. `rollout_mask_sums` [rows]
    counts the policy tokens of the rollout that a row belongs to. Rows of this project have their
    carriers in `prompt`; each is a rollout of its own.
    """
    rollout_ids = [
        sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples
    ]
    args.global_batch_size = len(set(rollout_ids))
    masks = [
        [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        for sample in samples
    ]
    sums: dict[int | None, int] = dict.fromkeys(rollout_ids, 0)
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        sums[rollout_id] += sum(mask)
    train_data: dict[str, list[Any]] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": [sums[rollout_id] for rollout_id in rollout_ids],
    }
    optional = {
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "rollout_routed_experts": [sample.rollout_routed_experts for sample in samples],
        "prompt": [(sample.metadata or {}).get(CARRIER) for sample in samples],
    }
    for key, values in optional.items():
        present = [value is not None for value in values]
        if all(present):
            train_data[key] = values
        elif any(present):
            raise ValueError(f"{key}: {sum(present)} of {len(samples)} samples have it; all must")
    return _for_each_step(train_data)


def _for_each_step(train_data: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The rows once for each step on them, with new rollout ids."""
    carriers = train_data.get("prompt", ())
    number = carriers[0].batch.epochs if carriers else 1
    if number == 1:
        return train_data
    ids = train_data["rollout_ids"]
    shift = max(ids) + 1
    repeated = {key: values * number for key, values in train_data.items()}
    repeated["rollout_ids"] = [one + step * shift for step in range(number) for one in ids]
    return repeated


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Sample],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Log what was handed over, in place of slime's figures about its own generation.

    slime's figures would mean nothing: no token was generated in this call.
    """
    metrics = {**(rollout_extra_metrics or {}), "perf/rollout_time": rollout_time}
    logger.info("rollout %d: %s", rollout_id, metrics)
    if getattr(args, "use_wandb", False) or getattr(args, "use_tensorboard", False):
        logging_utils.log(args, {**metrics, "rollout/step": rollout_id}, step_key="rollout/step")
    args.logged_rollout_id = rollout_id
    return True


def row_sample(row: TrainRow, index: int) -> Sample:
    """A merged row as slime's sample; `index` is its place in the batch."""
    carrier = row.carrier
    rewards = [turn.sample.reward for turn in carrier.turns]
    known = [reward for reward in rewards if reward is not None]
    return Sample(
        index=index,
        # slime takes a step of exactly `global_batch_size` distinct ids.
        rollout_id=index,
        tokens=row.ids.tolist(),
        response_length=carrier.response_length,
        loss_mask=carrier.loss_mask(),
        rollout_log_probs=carrier.rollout_logprobs().tolist(),
        # Only for slime; objectives read each turn's own reward from the carrier.
        reward=float(np.mean(known)) if known and len(known) == len(rewards) else float("nan"),
        status=Sample.Status.COMPLETED,
        weight_versions=sorted(
            {str(span.version) for turn in carrier.turns for span in turn.sample.version_spans},
            key=int,
        ),
        rollout_routed_experts=row.experts,
        metadata={CARRIER: carrier},
    )


def _evaluated(groups: Sequence[Sequence[Sample]]) -> RolloutFnEvalOutput:
    samples = list(itertools.chain.from_iterable(groups))
    return RolloutFnEvalOutput(
        data={
            "data_source": {
                "rewards": [sample.reward for sample in samples],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        }
    )
