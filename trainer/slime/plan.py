"""Which objectives can be trained inside slime, and the flags of slime that each of them takes.

Our loss hook (`custom_loss`) computes every objective that needs no model besides slime's own, with
the code of the embedded trainer. slime's loss (`policy_loss`) can stand in only for the default
objective; our advantages and our rollout correction then act inside it.

It imports no torch and no slime: launches and dry runs call it.
"""

from __future__ import annotations

from typing import Any, Literal

from records.names import SideSource
from rollout_bridge.slime.needs import SampleNeeds
from trainer.config import TrainerConfig
from trainer.objectives.options import HindsightOpd

LossType = Literal["custom_loss", "policy_loss"]
Flag = tuple[str, ...]
HOOKS = "trainer.slime.hooks"

_REQUIRED: tuple[tuple[str, object, str], ...] = (
    ("rollout_temperature", 1.0, "advantages are at temperature 1; each sample keeps its own"),
    ("rollout_top_p", 1.0, "log-probs are those of the whole distribution"),
    ("kl_coef", 0, "the KL to the start is trainer.beta_kl"),
    ("use_opd", False, "the teacher's gap is in the advantages already"),
    ("normalize_advantages", False, "that is trainer.objective.normalise"),
    ("calculate_per_token_loss", False, "that is trainer.aggregation"),
    ("use_rollout_logprobs", False, "that is trainer.correction.mode"),
    ("use_critic", False, "there is no critic"),
    ("use_opsm", False, "that is trainer.objective.opsm_delta"),
    ("allgather_cp", False, "rows are split over context ranks as ring attention does"),
    ("keep_old_actor", False, "log-probs before the step are those of the weights that step"),
)
"""slime's settings that would change what is learned: name, value, what to use instead."""


def slime_supports(trainer: TrainerConfig) -> str | None:
    """None, or in one line why slime cannot train this configuration and what to set instead."""
    objective = trainer.objective
    if trainer.teacher.in_trainer:
        return (
            f"trainer.teacher.kind {trainer.teacher.kind} needs a second model in the trainer, "
            "which slime does not hold: set it to engine"
        )
    if trainer.side_source is SideSource.TEACHER:
        return (
            f"objective {objective.name!r} with direction forward trains on tokens drawn by a "
            "teacher in the trainer, which slime does not hold: set direction = reverse"
        )
    if "teacher_in_trainer" in objective.needs:
        return (
            f"objective {objective.name!r} needs a teacher in the trainer, which slime does not "
            "hold: choose hindsight_opd, supervised_opd, forward_kl_topk, topk_tail_reverse_kl, "
            "side_samples, sparse_kl, or support_of = teacher"
        )
    if trainer.replay_times != 1:
        return "slime is handed each turn once: set trainer.replay_times = 1"
    if objective.needs_sampling_weights:
        return (
            "slime does not hold the weights of earlier steps besides its own: unset "
            "objective.engine_cap"
        )
    if trainer.lora is not None:
        return "slime trains all weights: leave trainer.lora out"
    if trainer.pause_mode == "in_place":
        return (
            "slime aborts running requests for an update and flushes the cache: set "
            "trainer.pause_mode = abort"
        )
    if trainer.correction.settings().batch_normalize:
        return (
            "correction.batch_normalize needs what slime does not give before its first "
            "micro-batch, log-probs at each sample's temperature: set it to false"
        )
    if isinstance(objective, HindsightOpd) and objective.surrogate == "m2po":
        return (
            "surrogate m2po needs what slime does not give before its first micro-batch, "
            "log-probs at each sample's temperature: choose ppo"
        )
    return None


def sample_needs(trainer: TrainerConfig) -> SampleNeeds:
    """What a turn must have to be trained on; for slime's `hindsight_needs`."""
    objective, history, outcomes = trainer.objective, trainer.history, trainer.outcomes()
    return SampleNeeds(
        teacher="teacher_scalar" in objective.needs,
        reward="reward" in objective.needs,
        compared=objective.compares_rewards,
        top_k=objective.support_size if objective.support == "teacher" else 0,
        side_source=trainer.side_source,
        side_samples=0 if trainer.side_source is None else objective.support_size,
        past_versions=None if history is None else history.versions,
        first_answers=history is not None and history.first,
        compares_sessions=history is not None and history.sessions,
        values_turns=history is not None and history.values,
        outcome_reward=None if outcomes is None else outcomes.kind,
        outcome_wait_s=0.0 if outcomes is None else outcomes.wait_s,
    )


def policy_loss_supports(trainer: TrainerConfig) -> str | None:
    """None, or in one line why slime's own policy loss cannot stand in for this objective."""
    objective = trainer.objective
    if not isinstance(objective, HindsightOpd) or objective.surrogate != "ppo":
        return "policy_loss is the clipped surrogate of hindsight_opd: use custom_loss"
    if objective.opsm_delta is not None:
        return "policy_loss masks no sequences by turn: unset opsm_delta, or use custom_loss"
    correction = trainer.correction.settings()
    if correction.mode != "decoupled":
        return "policy_loss has no bypass mode: set correction.mode = decoupled, or use custom_loss"
    rejects = bool(correction.rejections) or correction.veto_threshold is not None
    if rejects and (trainer.beta_kl > 0 or trainer.beta_entropy != 0):
        return (
            "policy_loss keeps rejected tokens in its KL and entropy terms: set beta_kl = 0 and "
            "beta_entropy = 0, or use custom_loss"
        )
    if trainer.beta_kl > 0 and trainer.kl_type not in ("low_var_kl", "k2"):
        return (
            f"kl_type {trainer.kl_type} is another estimator in slime: set low_var_kl or k2, "
            "or use custom_loss"
        )
    if trainer.beta_kl > 0 and trainer.kl_ratio != "none":
        return "policy_loss has no kl_ratio: set it to none, or use custom_loss"
    return None


def rate_flags() -> list[Flag]:
    """slime's flags for steps at a smaller rate, if hints are practised."""
    return [
        ("--rollout-data-postprocess-path", f"{HOOKS}.postprocess_hook"),
        ("--custom-megatron-before-train-step-hook-path", f"{HOOKS}.before_step_hook"),
    ]


def loss_flags(trainer: TrainerConfig, loss_type: LossType = "custom_loss") -> list[Flag]:
    """slime's flags for advantages, loss and rollout correction.

    Raises ValueError where slime cannot train this configuration.
    """
    reason = slime_supports(trainer)
    if reason is None and loss_type == "policy_loss":
        reason = policy_loss_supports(trainer)
    if reason is not None:
        raise ValueError(reason)
    flags: list[Flag] = [
        ("--advantage-estimator", "grpo"),
        ("--custom-advantage-function-path", f"{HOOKS}.advantage_hook"),
        ("--loss-type", loss_type),
    ]
    if trainer.needs_start:
        # Without it slime does not load the start weights.
        is_slimes = loss_type == "policy_loss" and trainer.beta_kl > 0
        flags += [
            ("--use-kl-loss",),
            ("--kl-loss-coef", f"{trainer.beta_kl!r}"),
            ("--kl-loss-type", trainer.kl_type if is_slimes else "low_var_kl"),
        ]
    if loss_type == "custom_loss":
        flags.append(("--custom-loss-function-path", f"{HOOKS}.loss_hook"))
        return flags
    return flags + _policy_flags(trainer)


def _policy_flags(trainer: TrainerConfig) -> list[Flag]:
    objective = trainer.objective
    assert isinstance(objective, HindsightOpd)
    flags: list[Flag] = [
        ("--eps-clip", f"{objective.clip_low!r}"),
        ("--eps-clip-high", f"{objective.clip_high!r}"),
        ("--entropy-coef", f"{trainer.beta_entropy!r}"),
        # Also makes slime compute the log-probs before the step, which advantages need.
        ("--get-mismatch-metrics",),
        ("--use-tis",),
        ("--custom-tis-function-path", f"{HOOKS}.tis_hook"),
    ]
    if objective.dual_clip is not None:
        flags.append(("--eps-clip-c", f"{objective.dual_clip!r}"))
    return flags


def check_args(args: Any, trainer: TrainerConfig) -> None:
    """Whether slime's arguments mean what the configuration says.

    Raises ValueError, a line per argument, with what to set.
    """
    reason = slime_supports(trainer)
    problems = [] if reason is None else [reason]
    for name, wanted, why in _REQUIRED:
        found = getattr(args, name, wanted)
        if found != wanted:
            problems.append(f"slime's {name} is {found!r} and must be {wanted!r}: {why}")
    if args.loss_type == "policy_loss":
        problems += _policy_problems(args, trainer)
    elif args.loss_type != "custom_loss":
        problems.append(f"slime's loss_type is {args.loss_type!r}: set custom_loss")
    if problems:
        raise ValueError("\n".join(problems))


def _policy_problems(args: Any, trainer: TrainerConfig) -> list[str]:
    reason = policy_loss_supports(trainer)
    if reason is not None:
        return [reason]
    objective = trainer.objective
    assert isinstance(objective, HindsightOpd)
    wanted = {
        "eps_clip": objective.clip_low,
        "eps_clip_high": objective.clip_high,
        "eps_clip_c": objective.dual_clip,
        "entropy_coef": trainer.beta_entropy,
        "kl_loss_coef": trainer.beta_kl if args.use_kl_loss else 0.0,
        "use_kl_loss": trainer.needs_start,
        "advantage_estimator": "grpo",
        "use_unbiased_kl": False,
        "use_tis": True,
        "custom_tis_function_path": f"{HOOKS}.tis_hook",
        "custom_pg_loss_reducer_function_path": None,
    }
    if trainer.beta_kl > 0:
        wanted["kl_loss_type"] = trainer.kl_type
    return [
        f"slime's {name} is {getattr(args, name, None)!r} and the run's is {value!r}"
        for name, value in wanted.items()
        if getattr(args, name, None) != value
    ]
