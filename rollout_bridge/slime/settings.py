"""Settings of slime's rollout side: the run's configuration, and slime's own flags.

slime finds the run by `hindsight_config`, the path of RUN/config.toml, in its --custom-config-path.
Flags that would silently lose samples are refused here, each with what to set instead.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from records.config import StoreConfig
from records.training.share import LessonShares, Share
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.slime.carrier import CALIBRATION_BOUND
from rollout_bridge.slime.needs import SampleNeeds
from rollout_bridge.slime.probes import ProbePlan


class SlimeConfigError(ValueError):
    """A setting with which slime cannot train this run; one line: what, where, what to do."""


class HandoverConfig(BaseModel):
    """How ready turns are handed to slime's trainer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_wait_s: float = Field(default=120.0, gt=0)
    """How long a step waits for a full batch. After that, the ready turns make a smaller one; if
    there are none, one batch without turns lets a waiting weight update and checkpoint through.
    """
    poll_interval_s: float = Field(default=0.5, gt=0)
    """Pause between two checks of the store."""
    store_patience_s: float = Field(default=1800.0, gt=0)
    """How long the store may stay unreachable before the job ends; it can be resumed."""


class _TrainerKeys(BaseModel):
    """The part of the run's section [trainer] that samples depend on."""

    rollout_batch_size: int
    epochs_per_batch: int
    # Older configurations lack them.
    max_share: float = Share().most
    max_share_wait_s: float = Share().wait_s
    max_staleness: int
    lease_ttl_s: float
    schedule: str = "async"
    steps_off: int | None = None
    max_hold_s: float = 300.0
    lesson_counter_share: float = LessonShares().counter
    lesson_keep_share: float = LessonShares().keep
    lesson_wait_s: float = LessonShares().wait_s
    hint_wait_s: float = LessonShares().hold_s

    @property
    def staleness_bound(self) -> int:
        """See `trainer.config.TrainerConfig.staleness_bound`."""
        return 0 if self.schedule == "sync" else self.steps_off or self.max_staleness


class _ClusterKeys(BaseModel):
    """The part of the run's section [cluster] that this side reads."""

    # Older configurations lack it.
    calibration_bound: float = CALIBRATION_BOUND


class _GuardKeys(BaseModel):
    """The part of the run's section [guard] that this side reads."""

    canaries: Path | None = None


class Rollback(BaseModel):
    """The job begins with the weights of version `restores`; `parent` is the newest version that is
    given up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    restores: int
    parent: int


class _RunKeys(BaseModel):
    """The sections of a resolved configuration that are read here."""

    store: StoreConfig
    trainer: _TrainerKeys
    handover: HandoverConfig = Field(default_factory=HandoverConfig)
    model: str
    seed: int
    renderer: RendererConfig
    engine_client: EngineClientConfig
    cluster: _ClusterKeys = Field(default_factory=_ClusterKeys)
    rehearsal: RehearsalConfig = Field(default_factory=RehearsalConfig)
    guard: _GuardKeys = Field(default_factory=_GuardKeys)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeSettings:
    """One run inside slime. `first_version` is the label of the weights that the job starts with;
    `epochs_per_batch` steps are taken on the same rows, a multiple of `min_rows`. `hold_s`: the
    longest time that generation is held after each batch until its weights are served; None: never.
    `rehearsal`: batches contain lessons, by `lesson_shares`; None: they do not.
    `is_pipelined`: the next batch is asked for before the weights of the last one are served.
    `is_guarded`: each version is checked before it is trained further. `rollback`: the job goes
    back to an older version.
    """

    run_folder: Path
    store: StoreConfig
    handover: HandoverConfig
    batch_size: int
    epochs_per_batch: int
    max_staleness: int
    hold_s: float | None
    lease_ttl_s: float
    share: Share
    rehearsal: RehearsalConfig | None
    lesson_shares: LessonShares
    is_pipelined: bool
    is_guarded: bool
    rollback: Rollback | None
    first_version: int
    needs: SampleNeeds
    min_rows: int
    probes: ProbePlan
    save_folder: Path
    is_async_save: bool


def is_configured(args: Any) -> bool:
    """Whether slime was given a run."""
    return getattr(args, "hindsight_config", None) is not None


def read_settings(args: Any) -> SlimeSettings:
    """The settings of a job. Raises SlimeConfigError for what cannot work."""
    if not is_configured(args):
        raise SlimeConfigError(
            "hindsight_config is not set: write `hindsight_config: RUN/config.toml` into the file "
            "of --custom-config-path"
        )
    path = Path(args.hindsight_config)
    run = _read_run(path)
    _check_flags(args, run.trainer.rollout_batch_size)
    if run.rehearsal.enabled and getattr(args, "use_rollout_routing_replay", False):
        raise SlimeConfigError(
            "--use-rollout-routing-replay: lessons are stored without the experts that it needs; "
            "remove it, or set rehearsal.enabled = false"
        )
    if run.trainer.lease_ttl_s < 2 * run.handover.max_wait_s:
        raise SlimeConfigError(
            f"{path}: handover.max_wait_s = {run.handover.max_wait_s:g} must be at most half of "
            f"trainer.lease_ttl_s = {run.trainer.lease_ttl_s:g}, or leases end while a batch fills"
        )
    is_guarded = run.guard.canaries is not None
    return SlimeSettings(
        run_folder=path.parent,
        store=run.store,
        handover=run.handover,
        batch_size=run.trainer.rollout_batch_size,
        epochs_per_batch=run.trainer.epochs_per_batch,
        max_staleness=run.trainer.staleness_bound,
        hold_s=run.trainer.max_hold_s if run.trainer.schedule == "sync" else None,
        lease_ttl_s=run.trainer.lease_ttl_s,
        share=Share(most=run.trainer.max_share, wait_s=run.trainer.max_share_wait_s),
        rehearsal=run.rehearsal if run.rehearsal.enabled else None,
        lesson_shares=LessonShares.of_settings(run.trainer),
        is_pipelined=is_pipelined(
            run.trainer.schedule, checked=run.rehearsal.enabled or is_guarded
        ),
        is_guarded=is_guarded,
        rollback=_read_rollback(args),
        # slime continues to count from this number before it first sends weights to the engines.
        first_version=getattr(args, "update_weight_start_version", 0) + 1,
        needs=_read_needs(args),
        min_rows=min_rows(args),
        probes=ProbePlan(
            model=run.model,
            vocab_size=getattr(args, "vocab_size", None),
            renderer=run.renderer,
            client=run.engine_client,
            seed=run.seed,
            bound=run.cluster.calibration_bound,
        ),
        save_folder=Path(args.save),
        is_async_save=bool(getattr(args, "async_save", False)),
    )


def is_pipelined(schedule: str, *, checked: bool) -> bool:
    """Whether slime prepares the next batch during a step (train_async.py). Not with `sync`, and
    not if each version is `checked` (hints are practised, or there is a guard): a batch depends on
    the measurement of the version before it.
    """
    return schedule != "sync" and not checked


def min_rows(args: Any) -> int:
    """Fewest sequences of a step: one for each copy of the model and virtual stage.

    slime splits a step into as many micro-batches as there are copies, times the micro-batches of a
    group if the pipeline is interleaved, and fails if there are fewer sequences.
    """
    gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    pipeline = args.pipeline_model_parallel_size
    copies = max(
        gpus // (args.tensor_model_parallel_size * pipeline * args.context_parallel_size), 1
    )
    if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) == 1:
        return copies
    return copies * (getattr(args, "microbatch_group_size_per_vp_stage", None) or pipeline)


def _read_needs(args: Any) -> SampleNeeds:
    try:
        return SampleNeeds.model_validate(getattr(args, "hindsight_needs", None))
    except ValidationError as error:
        raise SlimeConfigError(
            "hindsight_needs: the file of --custom-config-path must list what the objective needs, "
            f"as `opd slime` writes it: {error.errors()[0]['msg']}"
        ) from None


def _read_rollback(args: Any) -> Rollback | None:
    given = getattr(args, "hindsight_rollback", None)
    try:
        return None if given is None else Rollback.model_validate(given)
    except ValidationError as error:
        raise SlimeConfigError(
            "hindsight_rollback: the file of --custom-config-path must say what to go back to, as "
            f"`opd slime` writes it: {error.errors()[0]['msg']}"
        ) from None


def _read_run(path: Path) -> _RunKeys:
    try:
        return _RunKeys.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SlimeConfigError(
            f"hindsight_config: cannot read {path} ({error.strerror}); the run folder must be on "
            "storage that every node sees"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SlimeConfigError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SlimeConfigError(f"{path}: {where}: {first['msg']}") from None


def _check_flags(args: Any, batch_size: int) -> None:
    refused = (
        (
            not args.rollout_global_dataset,
            "--disable-rollout-global-dataset: leave it out, or slime never reports checkpoints "
            "to this project and no sample is ever marked trained",
        ),
        (
            args.save is None or args.save_interval is None,
            "--save and --save-interval: set both; a sample is marked trained by a checkpoint",
        ),
        (
            args.num_rollout is None,
            "--num-rollout: set it; live traffic has no epochs that --num-epoch could count",
        ),
        (
            args.n_samples_per_prompt != 1,
            f"--n-samples-per-prompt {args.n_samples_per_prompt}: use 1, a sample is one turn",
        ),
        (
            args.rollout_batch_size != batch_size,
            f"--rollout-batch-size {args.rollout_batch_size}: use trainer.rollout_batch_size = "
            f"{batch_size} of the run",
        ),
        (
            getattr(args, "update_weights_interval", 1) != 1,
            f"--update-weights-interval {getattr(args, 'update_weights_interval', 1)}: use 1, each "
            "step makes one policy version",
        ),
        (
            not args.use_dynamic_batch_size,
            "--use-dynamic-batch-size: set it; a fixed micro-batch cannot hold a varying number of "
            "sequences",
        ),
        (
            args.custom_convert_samples_to_train_data_path is None,
            "--custom-convert-samples-to-train-data-path: set "
            "rollout_bridge.slime.rollout.convert_samples, or scores are lost on the way",
        ),
    )
    wrong = [message for holds, message in refused if holds]
    if wrong:
        raise SlimeConfigError("; ".join(wrong))
