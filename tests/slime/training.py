"""slime's trainer in one process on a CPU: its own data path, schedule, advantages and loss.

What runs is slime's and Megatron's code, from the train data of a rollout to gradients. Only the
model is a small one of Hugging Face's, in slime's packed layout, and gradients are left alone
instead of being stepped on. Needs slime on the path (`prepare_process`).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import sys
import types
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from opd.run.config import build as build_config
from opd.run.config import save
from records.types import ReadySample
from rollout_bridge.merging import PackedSequence
from rollout_bridge.slime.carrier import build
from trainer.config import TrainerConfig
from trainer.slime.plan import LossType, loss_flags, rate_flags

STUBS = Path(__file__).with_name("stubs")


def prepare_process(slime_root: Path, store: Path, *, rank: int = 0, **sizes: int) -> None:
    """Import slime on a CPU and join `sizes` of Megatron's groups, all ranks in one world."""
    for path in (str(STUBS), str(slime_root)):
        if path not in sys.path:
            sys.path.append(path)
    # slime compiles two of its loss functions, which takes longer than all the rest.
    torch._dynamo.config.disable = True
    world = 1
    for size in sizes.values():
        world *= size
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    with warnings.catch_warnings():
        # Megatron warns of every GPU library that is not there.
        warnings.simplefilter("ignore")
        _without_training_package()
        import slime.backends.megatron_utils.loss
        import slime.backends.megatron_utils.model
        import slime.ray.rollout  # noqa: F401
        from megatron.core import mpu
        from slime.utils import accelerator

        mpu.initialize_model_parallel(
            tensor_model_parallel_size=sizes.get("tensor", 1),
            context_parallel_size=sizes.get("context", 1),
            create_gloo_process_groups=True,
        )
        accelerator.current_device = lambda: torch.device("cpu")
        accelerator.device = lambda *_: torch.device("cpu")


def _without_training_package() -> None:
    """`megatron.training` is no part of megatron-core's wheel; slime's model.py needs one function
    of it for a step.
    """
    names = {
        "global_vars": ("get_args",),
        "training": ("get_model",),
        "checkpointing": ("load_checkpoint", "save_checkpoint"),
        "arguments": ("core_transformer_config_from_args",),
    }
    package = types.ModuleType("megatron.training")
    package.__path__ = []
    sys.modules["megatron.training"] = package
    for module, functions in names.items():
        stub = types.ModuleType(f"megatron.training.{module}")
        for function in functions:
            setattr(stub, function, _absent)
        sys.modules[stub.__name__] = stub


def _absent(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no part of a training step")


class _Cpu(torch.overrides.TorchFunctionMode):
    """Megatron's schedule makes its counters on "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class PackedModel(nn.Module):
    """A causal LM of Hugging Face as slime calls Megatron's: packed tokens [1, T], this context
    rank's part of them, to logits [1, T, v], this tensor rank's part of the vocabulary.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from megatron.core.enums import ModelType
        from megatron.core.transformer import TransformerConfig

        self.inner = model
        self.model_type = ModelType.encoder_or_decoder
        with warnings.catch_warnings():
            # Its own defaults are deprecated.
            warnings.simplefilter("ignore")
            self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)

    def zero_grad_buffer(self) -> None:
        """The step's gradients are what a test wants to see."""

    def set_input_tensor(self, _: Any) -> None:
        """Of a pipeline there is one stage."""

    def forward(self, input_ids: Tensor, packed_seq_params: Any, **_: Any) -> Tensor:
        from megatron.core import mpu

        context, own = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        parts = [torch.empty_like(input_ids[0]) for _ in range(context)]
        group = mpu.get_context_parallel_group()
        torch.distributed.all_gather(parts, input_ids[0].contiguous(), group=group)
        edges = (packed_seq_params.cu_seqlens_q // context).tolist()
        logits = []
        for start, end in itertools.pairwise(edges):
            # Rank r has the chunks r and 2 n - 1 - r of each sequence.
            halves = [part[start:end].chunk(2) for part in parts]
            if context == 1:
                ids = input_ids[0, start:end]
            else:
                ids = torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]])
            scores = self.inner(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
            if context > 1:
                chunks = scores.chunk(2 * context)
                scores = torch.cat([chunks[own], chunks[2 * context - 1 - own]])
            logits.append(scores)
        whole = torch.cat(logits).unsqueeze(0)
        tensor = mpu.get_tensor_model_parallel_world_size()
        return whole.chunk(tensor, dim=-1)[mpu.get_tensor_model_parallel_rank()].contiguous()


class _NoOptimizer:
    """In the place of Megatron's: a step that leaves weights and gradients as they are."""

    def zero_grad(self) -> None:
        """Gradients start as None."""

    def step(self) -> tuple[bool, float, None]:
        """Successful, with the gradient norm unknown."""
        return True, float("nan"), None


class _AdamW:
    """In the place of Megatron's: the optimiser and the clipping of the embedded trainer."""

    def __init__(self, model: nn.Module, trainer: TrainerConfig) -> None:
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.grad_clip = trainer.grad_clip
        self.inner = torch.optim.AdamW(
            self.parameters,
            lr=trainer.learning_rate,
            betas=trainer.adam_betas,
            eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
        )

    def zero_grad(self) -> None:
        """Of the step before."""
        self.inner.zero_grad()

    def step(self) -> tuple[bool, float, None]:
        """Successful, with the gradient norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        self.inner.step()
        return True, float(norm), None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As Megatron's scheduler sets their rates."""
        return self.inner.param_groups


def _scheduler(optimizer: _AdamW, trainer: TrainerConfig) -> Any:
    """Megatron's own, at a constant rate."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=trainer.learning_rate,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=trainer.weight_decay,
        end_wd=trainer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What slime did with a batch: advantages by row (those of this rank), its training metrics,
    what it logged of the rollout, gradients by parameter.
    """

    advantages: dict[int, Tensor]
    metrics: dict[str, float]
    rollout: dict[str, float]
    gradients: dict[str, Tensor]
    num_micro_batches: int


def arguments(
    trainer: TrainerConfig,
    folder: Path,
    *,
    loss_type: LossType = "custom_loss",
    max_tokens: int = 4096,
    rehearses: bool = False,
    **changes: Any,
) -> Namespace:
    """slime's arguments for `trainer`: its defaults, and the flags of the launch."""
    args = Namespace(
        advantage_estimator="grpo",
        allgather_cp=False,
        balance_by_flops=False,
        balance_data=False,
        calculate_per_token_loss=False,
        check_for_nan_in_loss_and_grad=True,
        ci_test=False,
        custom_advantage_function_path=None,
        custom_loss_function_path=None,
        custom_megatron_before_log_prob_hook_path=None,
        custom_megatron_before_train_step_hook_path=None,
        custom_pg_loss_reducer_function_path=None,
        custom_tis_function_path=None,
        data_pad_size_multiplier=8,
        decoder_seq_length=None,
        enable_mtp_training=False,
        entropy_coef=0.0,
        eps_clip=0.2,
        eps_clip_c=None,
        eps_clip_high=0.2,
        gamma=1.0,
        get_mismatch_metrics=False,
        global_batch_size=0,
        hindsight_config=str(_config_file(trainer, folder)),
        keep_old_actor=False,
        kl_coef=0.0,
        kl_loss_coef=0.0,
        kl_loss_type="k1",
        lambd=1.0,
        log_correct_samples=False,
        log_multi_turn=False,
        log_passrate=False,
        log_probs_chunk_size=-1,
        loss_type="policy_loss",
        max_tokens_per_gpu=max_tokens,
        micro_batch_size=1,
        multi_latent_attention=False,
        n_samples_per_prompt=1,
        normalize_advantages=False,
        opd_kl_coef=1.0,
        opd_type=None,
        recompute_loss_function=False,
        rollout_batch_size=1,
        rollout_data_postprocess_path=None,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        save_debug_train_data=None,
        seq_length=4096,
        tis_clip=2.0,
        tis_clip_low=0.0,
        use_critic=False,
        use_dynamic_batch_size=True,
        use_kl_loss=False,
        use_opd=False,
        use_opsm=False,
        use_rollout_entropy=False,
        use_rollout_logprobs=False,
        use_tensorboard=False,
        use_tis=False,
        use_unbiased_kl=False,
        use_wandb=False,
        vocab_size=64,
        wandb_always_use_train_step=False,
    )
    for flag, *values in [*loss_flags(trainer, loss_type), *(rate_flags() if rehearses else [])]:
        name = flag.removeprefix("--").replace("-", "_")
        assert hasattr(args, name), name
        old = getattr(args, name)
        number = isinstance(old, float) or name == "eps_clip_c"
        value: Any = values[0] if values else True
        setattr(args, name, float(value) if number else value)
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def train_data(
    args: Namespace,
    samples: Sequence[ReadySample],
    sequences: Sequence[PackedSequence],
    version_gaps: Sequence[int],
    epochs: int = 1,
    step: int = 0,
) -> dict[str, Any]:
    """What the convert hook gives slime for these rows."""
    args.global_batch_size = len(sequences)
    carriers = build(samples, sequences, version_gaps, epochs, step=step) * epochs
    sequences = [*sequences] * epochs
    masks = [carrier.loss_mask() for carrier in carriers]
    return {
        "tokens": [sequence.ids.tolist() for sequence in sequences],
        "response_lengths": [carrier.response_length for carrier in carriers],
        "rewards": [0.0] * len(carriers),
        "raw_reward": [0.0] * len(carriers),
        "truncated": [0] * len(carriers),
        "sample_indices": list(range(len(carriers))),
        "rollout_ids": list(range(len(carriers))),
        "loss_masks": masks,
        "rollout_mask_sums": [sum(mask) for mask in masks],
        "rollout_log_probs": [carrier.rollout_logprobs() for carrier in carriers],
        "prompt": carriers,
    }


def run_step(
    args: Namespace,
    data: dict[str, Any],
    model: nn.Module,
    reference: nn.Module | None,
    stepping: TrainerConfig | None = None,
) -> StepResult:
    """slime's training on `data`; gradients of `model` are this rank's, those of the last step.
    `stepping`: the settings of an optimiser that moves the weights; None: they stay.
    """
    from megatron.core import mpu
    from slime.backends.megatron_utils import loss as slime_loss
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.observability import train_metric_utils
    from slime.utils.misc import load_function

    rollout_data = _of_this_rank(args, data)
    iterator = get_data_iterator(rollout_data)
    packed = PackedModel(model)
    logged: dict[str, float] = {}

    def log_probs(one: nn.Module, prefix: str) -> dict[str, Any]:
        return slime_model.forward_only(
            slime_loss.get_log_probs_and_entropy,
            args,
            [one],
            iterator,
            rollout_data["num_microbatches"],
            store_prefix=prefix,
        )

    def note(_: Any, values: dict[str, float], **__: Any) -> None:
        logged.update(values)

    with (
        _Cpu(),
        mock.patch.object(slime_model, "get_args", return_value=args),
        mock.patch.object(train_metric_utils.logging_utils, "log", note),
    ):
        if reference is not None:
            rollout_data.update(log_probs(PackedModel(reference), "ref_"))
        rollout_data.update(log_probs(packed, ""))
        slime_loss.compute_advantages_and_returns(args, rollout_data)
        train_metric_utils.log_rollout_data(0, args, rollout_data)
        for one in iterator:
            one.reset()
        optimizer, scheduler = _NoOptimizer(), types.SimpleNamespace(step=lambda increment: None)
        if stepping is not None:
            optimizer = _AdamW(model, stepping)
            scheduler = _scheduler(optimizer, stepping)
        if args.rollout_data_postprocess_path is not None:
            load_function(args.rollout_data_postprocess_path)(args, 0, rollout_data)
        steps = zip(
            rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True
        )
        metrics, num_micro_batches = {}, 0
        for number, (num_micro_batches, size) in enumerate(steps):
            metrics, _ = slime_model.train_one_step(
                args,
                0,
                number,
                iterator,
                [packed],
                optimizer,
                scheduler,
                num_micro_batches,
                size,
            )
    assert mpu.is_pipeline_last_stage()
    return StepResult(
        # slime packs rows in an order of its own.
        advantages=dict(zip(rollout_data["partition"], rollout_data["advantages"], strict=True)),
        metrics=metrics,
        rollout={name.removeprefix("rollout/"): value for name, value in logged.items()},
        gradients={
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
        num_micro_batches=num_micro_batches,
    )


def _of_this_rank(args: Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """Through slime's own filter of keys, to its trainer's form (MegatronTrainRayActor)."""
    import slime.ray.rollout as slime_rollout
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.utils import data as slime_data

    sizes = {
        "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=False),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    manager = types.SimpleNamespace(args=args, train_parallel_config=sizes)
    split = slime_rollout.RolloutManager.__ray_metadata__.modified_class._split_train_data_by_dp
    # One process: what goes into ray's object store comes out of it.
    with (
        mock.patch.object(slime_rollout.ray, "put", lambda value, **_: value),
        mock.patch.object(slime_data.ray, "get", lambda value: value),
    ):
        boxes = split(manager, dict(data))
        rank = mpu.get_data_parallel_rank(with_context_parallel=False)
        rollout_data = slime_data.process_rollout_data(args, boxes, rank, sizes["dp_size"])
    lengths = (rollout_data["total_lengths"], rollout_data["response_lengths"])
    rollout_data["rollout_log_probs"] = [
        slice_log_prob_with_cp(values, total, response)
        for values, total, response in zip(rollout_data["rollout_log_probs"], *lengths, strict=True)
    ]
    return rollout_data


def _config_file(trainer: TrainerConfig, folder: Path) -> Path:
    """A run's resolved configuration, as a launch writes it."""
    rewards = "verdict" if trainer.objective.outcome_reward is None else "outcome"
    values = {
        "model": "model",
        "store": {"url": "sqlite:///records.db"},
        "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "judge", "reward": rewards},
        "scoring": {"top_k": 64},
        "verifier": {"source": "my_checks:booked", "continuations": 4},
        "trainer": trainer.model_dump(mode="json", exclude_none=True),
    }
    path = folder / f"config-{len(list(folder.iterdir()))}.toml"
    save(build_config(values), path)
    return path
