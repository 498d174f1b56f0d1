"""Combinations of options that are mathematically wrong, refused before any model is loaded.

Rules: ALGORITHMS 2.4 and 7.1. A check raises a ValueError of one line that says what to choose
instead, or returns a warning of one line, or None. It imports no torch, because the configuration
calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.objectives.kl_names import KL_NAMES, canonical_kl_name
from trainer.objectives.rollout_correction.nearest import unknown_name

TOPK_MODES = frozenset({"forward_kl_topk", "topk_tail_reverse_kl"})
LOSS_MODES = frozenset({*KL_NAMES, *(f"{name}+" for name in KL_NAMES), *TOPK_MODES})
POLICY_LOSS_MODES = ("vanilla",)
RESERVED_TEACHER_NAME = "teacher_model"


def check_loss_mode(loss_mode: str, *, use_policy_gradient: bool) -> str | None:
    """Whether the divergence may serve as a loss, or as an advantage with policy gradient.

    Raises ValueError for an unknown mode (with the nearest one), k1 as a loss under any of its
    names, k2 as an advantage, and a top-k divergence as an advantage. Warns of abs and k3 as one.
    """
    if loss_mode not in LOSS_MODES:
        raise unknown_name("loss_mode", loss_mode, LOSS_MODES)
    if loss_mode in TOPK_MODES:
        if use_policy_gradient:
            raise ValueError(
                f"loss_mode {loss_mode!r} with policy gradient blames the sampled token for the "
                "whole distribution's divergence; set use_policy_gradient false, or use k1"
            )
        return None
    base, straight_through = canonical_kl_name(loss_mode)
    if not use_policy_gradient:
        if base == "k1" and not straight_through:
            raise ValueError(
                f"loss_mode {loss_mode!r} without policy gradient has a gradient that ignores the "
                "teacher; use k1+, k2 or k3, or set use_policy_gradient true"
            )
        return None
    if base == "k2":
        raise ValueError(
            f"loss_mode {loss_mode!r} with policy gradient punishes every token, whatever the "
            "teacher thinks of it; use k1, or set use_policy_gradient false"
        )
    if base in ("abs", "k3"):
        return (
            f"loss_mode {loss_mode!r} with policy gradient gives no token a positive advantage: "
            "the direction is lost; k1 keeps it"
        )
    return None


def check_policy_loss_mode(mode: str, known: Sequence[str] = POLICY_LOSS_MODES) -> None:
    """Raise ValueError, with the nearest known name, for a surrogate that there is not."""
    if mode not in known:
        raise unknown_name("policy_loss_mode", mode, known)


def check_topk(loss_mode: str, topk: int | None, *, engine_max_logprobs: int | None = None) -> None:
    """Raise ValueError if a top-k mode has no positive `topk`, or an engine that returns fewer.

    `engine_max_logprobs` None means that the limit is not known.
    """
    if loss_mode not in TOPK_MODES:
        return
    if topk is None or topk < 1:
        raise ValueError(f"loss_mode {loss_mode!r} needs topk of at least 1, got {topk}; set 32")
    if engine_max_logprobs is not None and engine_max_logprobs < topk:
        raise ValueError(
            f"topk {topk} exceeds the teacher engine's max_logprobs {engine_max_logprobs}; "
            f"raise max_logprobs to {topk} or lower topk"
        )


def check_teacher_length(
    teacher_max_len: int, *, max_prompt_tokens: int, max_response_tokens: int
) -> None:
    """Raise ValueError if a teacher's context does not hold prompt, response and one token more.

    The one more is what an engine generates when it is asked to score.
    """
    needed = max_prompt_tokens + max_response_tokens + 1
    if teacher_max_len < needed:
        raise ValueError(
            f"the teacher's max_len {teacher_max_len} is below prompt + response + 1 = {needed}; "
            f"raise it to {needed} or shorten prompts or responses"
        )


def check_teachers(
    keys: Sequence[str | None], routing_keys: Sequence[str] = (), *, default: bool = False
) -> None:
    """Raise ValueError unless several teachers have distinct keys and each route ends at one.

    `keys` has one entry per teacher, None where it has no key; `routing_keys` are those that the
    samples carry. With `default` a sample whose key nobody has goes to the first teacher.
    """
    if not keys:
        raise ValueError("no teacher is configured; name at least one")
    named = [key for key in keys if key]
    if RESERVED_TEACHER_NAME in named and len(keys) > 1:
        raise ValueError(
            f"a teacher among several must not be named {RESERVED_TEACHER_NAME!r}, which means the "
            "only one; rename it"
        )
    if len(keys) > 1 and len(set(named)) < len(keys):
        twice = sorted({key for key in named if named.count(key) > 1})
        what = f"{', '.join(map(repr, twice))} used twice" if twice else "a teacher has none"
        raise ValueError(f"{len(keys)} teachers need distinct keys: {what}; give each its own")
    if len(keys) > 1 and not default:
        for key in routing_keys:
            if key not in named:
                raise unknown_name("routing key of a teacher", key, named)


def check_teacher_gpus(gpus_per_teacher: Mapping[str, int], pool: int) -> None:
    """Raise ValueError unless the teachers' replicas use the pool's GPUs exactly."""
    total = sum(gpus_per_teacher.values())
    if total != pool:
        raise ValueError(
            f"the teachers' replicas use {total} GPUs and their pool has {pool}; make them equal"
        )


def check_kl_terms(
    *, teacher_kl_is_loss: bool, reference_kl_coef: float, both_explicit: bool = False
) -> str | None:
    """Warn if a KL to the teacher and one to the reference act at once and nobody asked for both.

    `both_explicit`: the configuration names both coefficients.
    """
    if teacher_kl_is_loss and reference_kl_coef > 0 and not both_explicit:
        return (
            f"a KL to the teacher and one to the reference (coefficient {reference_kl_coef:g}) act "
            "at once and pull apart; set the reference's coefficient to 0, or name both"
        )
    return None
