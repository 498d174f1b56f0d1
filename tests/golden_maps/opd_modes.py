"""OPD's modes and advantages: `verl091_distillation_ppo_loss`, `openclaw_combine_loss`,
`opd_advantage_replacement`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.golden_maps.check import (
    FLOAT32_INSIDE_TOLERANCE,
    METRIC_TOLERANCE,
    Case,
    Comparison,
    Deliberate,
    GoldenMap,
    Meta,
)
from tests.trainer.golden import decode
from tests.trainer.live import (
    logprobs_of,
    loss_of,
    sampled_logprobs,
    support_logprobs,
    support_of,
    token_batch,
    top_ids,
)
from tests.trainer.tiny import random_ids, sample
from trainer.batch.collate import TurnScores
from trainer.batch.views import Taught, view_turn
from trainer.objectives.batch import TokenBatch, select_finite
from trainer.objectives.frame import LossSettings, ObjectiveResult, objective_terms
from trainer.objectives.names import TOPK_MODES, canonical_kl_name, check_loss_mode
from trainer.objectives.options import ForwardKlTopk, HindsightOpd, SupervisedOpd
from trainer.objectives.policy.policy_gradient import advantages, combined_advantages
from trainer.rewards.groups import eligible_samples, group_ids, group_pass_rates
from trainer.step.preparation import batch_statistics

NUMBERS = np.random.default_rng(0)
VERL_DUAL_CLIP = 3.0
VERL_LOSS_MODE = "k3"
"""The reference's defaults."""
DivergenceT = TypeVar("DivergenceT", SupervisedOpd, ForwardKlTopk)


def verl_distillation_ppo_loss(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss, gradient of the packed logits and every metric of both branches."""
    inputs, outputs, config = case["inputs"], case["outputs"], case["config"]
    is_topk = config["loss_mode"] in TOPK_MODES
    tolerance = FLOAT32_INSIDE_TOLERANCE if is_topk else None
    logits = inputs["student_logits_packed"].detach().clone().requires_grad_()
    batch = _distillation_batch(inputs, config, logits)
    loss, ours = _distilled(batch, config, _aggregation(inputs, config))
    (gradient,) = torch.autograd.grad(loss, logits)
    yield Comparison(name="loss", ours=loss, reference=outputs["loss"], tolerance=tolerance)
    yield Comparison(
        name="grad_student_logits",
        ours=gradient,
        reference=outputs["grad_student_logits"],
        tolerance=tolerance,
    )
    if "student_log_probs_padded" in case.get("intermediate", {}):
        yield Comparison(
            name="student_log_probs",
            ours=_select(batch.logprobs_BT, batch.mask_BT),
            reference=_select(case["intermediate"]["student_log_probs_padded"], batch.mask_BT),
        )
    references = {name: _metric_value(value) for name, value in outputs["metrics"].items()}
    yield Comparison(name="metric names", ours=sorted(ours), reference=sorted(references))
    for name, reference in references.items():
        yield Comparison(
            name=name, ours=ours.get(name), reference=reference, tolerance=METRIC_TOLERANCE
        )
    yield from _config_validation(meta)


def _distillation_batch(inputs: Case, config: Mapping[str, Any], logits: Tensor) -> TokenBatch:
    """Responses as rows; the teacher's say is its sampled token's or its top-k's."""
    rows = _response_rows(inputs["prompt_lens"], inputs["response_lens"])
    logits_BTV = _padded(logits, rows)
    tokens_BT = _padded(torch.as_tensor(inputs["token_ids_packed"]).roll(-1), rows)
    width = logits_BTV.shape[1]
    mask_BT = inputs["response_mask"].to(logits.dtype)[:, :width]
    correction = inputs.get("rollout_is_weights")
    teacher_BT, support = None, None
    if config["loss_mode"] in TOPK_MODES:
        ids_BTK = _padded(inputs["teacher_topk_ids_packed"], rows).long()
        teacher_BTK = _padded(inputs["teacher_topk_log_probs_packed"], rows)
        support = replace(
            support_of(ids_BTK, support_logprobs(logits_BTV, ids_BTK), teacher_BTK),
            student_topk_ids_BTK=top_ids(logits_BTV, config["topk"]),
        )
    else:
        teacher_BT = _padded(inputs["teacher_log_probs_packed"], rows)
    return token_batch(
        sampled_logprobs(logits_BTV, tokens_BT),
        mask_BT,
        old_BT=inputs["old_log_probs"][:, :width],
        teacher_BT=teacher_BT,
        rewards_BT=inputs["advantages"][:, :width],
        weights_BT=None if correction is None else correction[:, :width],
        support=support,
    )


def _aggregation(inputs: Case, config: Mapping[str, Any]) -> LossSettings:
    return LossSettings(
        aggregation=config["loss_agg_mode"],
        beta_kl=0.0,
        horizon=config.get("loss_scale_factor", inputs["response_mask"].shape[-1]),
        reward_clip_low=config["clip_ratio_low"],
        reward_clip_high=config["clip_ratio_high"],
    )


def _distilled(
    batch: TokenBatch, config: Mapping[str, Any], settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole loss, and the reference's metrics of both its terms."""
    of_tokens = replace(settings, aggregation="token-mean")
    divergence = _divergence(config)
    task = _surrogate(config, opd_coef=0.0, reward_coef=1.0)
    measured = loss_of(batch, _clamped(divergence, None), of_tokens)
    teaching, options = batch, divergence
    if config["use_policy_gradient"] and config["loss_mode"] in TOPK_MODES:
        # A divergence over a support is refused as an advantage: it stands in for a reward.
        blamed_BT = -objective_terms(select_finite(batch)[0], divergence).loss_BT.detach()
        teaching, options = replace(batch, reward_advantages_BT=blamed_BT), task
    elif config["use_policy_gradient"]:
        options = _surrogate(config, opd_coef=1.0, reward_coef=0.0)
    taught = loss_of(teaching, options, settings)
    ours = _named("distillation", _divergence_metrics(measured, config))
    ours["distillation/loss"] = taught.reduced["opd/kl_loss"]
    if config["use_policy_gradient"]:
        reports = loss_of(teaching, options, of_tokens).reduced
        ours |= {f"distillation/{name}": reports[name] for name in SURROGATE_METRICS}
    # Without task rewards and without policy gradient the reference has no task loss to report.
    if config["use_task_rewards"] or config["use_policy_gradient"]:
        reports = loss_of(batch, task, of_tokens).reduced
        ours |= {f"actor/{name}": reports[name] for name in SURROGATE_METRICS}
        ours["actor/pg_loss"] = loss_of(batch, task, settings).reduced["pg_loss"]
    if not config["use_task_rewards"]:
        return taught.loss, ours
    coef = config["distillation_loss_coef"]
    if config["use_policy_gradient"]:
        both = _surrogate(config, opd_coef=coef, reward_coef=1.0)
        return loss_of(batch, both, settings).loss, ours
    # The reference weighs the divergence, ours the reward beside it.
    both = divergence.model_copy(update={"reward_coef": 1.0 / coef})
    return coef * loss_of(batch, both, settings).loss, ours


SURROGATE_METRICS = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


def _divergence(config: Mapping[str, Any]) -> SupervisedOpd | ForwardKlTopk:
    """The divergence as a loss; `model_copy` lets names through that a run's options refuse."""
    if config["loss_mode"] in TOPK_MODES:
        options = ForwardKlTopk(
            name="forward_kl_topk",
            topk=config["topk"],
            log_prob_min_clamp=config["log_prob_min_clamp"],
        )
        return _clamped(options, config["loss_max_clamp"])
    options = SupervisedOpd(name="supervised_opd")
    options = options.model_copy(update={"estimator": config["loss_mode"]})
    return _clamped(options, config["loss_max_clamp"])


def _clamped(options: DivergenceT, limit: float | None) -> DivergenceT:
    return options.model_copy(update={"loss_max_clamp": limit})


def _surrogate(config: Mapping[str, Any], *, opd_coef: float, reward_coef: float) -> HindsightOpd:
    """The divergence, the task's reward, or both as the advantage of one policy gradient."""
    options = HindsightOpd(
        advantage_reference="current",
        opd_coef=opd_coef,
        reward_coef=reward_coef,
        loss_max_clamp=config["loss_max_clamp"],
        clip_low=config["clip_ratio_low"],
        clip_high=config["clip_ratio_high"],
        dual_clip=config.get("clip_ratio_c", VERL_DUAL_CLIP),
    )
    if opd_coef == 0.0:
        return options
    return options.model_copy(update={"estimator": config["loss_mode"]})


def _divergence_metrics(measured: ObjectiveResult, config: Mapping[str, Any]) -> dict[str, Any]:
    """Means and extremes over tokens, of the divergence before its clamp; NaN of an empty mask."""
    means = {name.removeprefix("opd/"): value for name, value in measured.reduced.items()}
    ranges = {name.removeprefix("opd/"): value for name, value in measured.token_ranges.items()}
    is_empty = not measured.mask_BT.any()
    metrics: dict[str, Any] = {}

    def extremes(name: str) -> None:
        lowest, highest = (math.nan, math.nan) if is_empty else ranges[name]
        metrics[f"{name}_min"], metrics[f"{name}_max"] = lowest, highest

    extremes("loss")
    if config["loss_mode"] not in TOPK_MODES:
        metrics["abs_loss"] = math.nan if is_empty else means["abs_loss"]
        return metrics
    for name in ("student_mass", "teacher_mass"):
        extremes(name)
    names = ("student_mass", "teacher_mass", "overlap_ratio", "overlap_token_advantage")
    metrics |= {name: math.nan if is_empty else means[name] for name in names}
    if not is_empty and means["overlapping_frac"] > 0:
        # Of tokens that overlap alone, as the batch's totals divide it.
        metrics["overlap_token_advantage"] = (
            means["overlap_token_advantage"] / means["overlapping_frac"]
        )
    return metrics


SURROGATES = "the reference distils with its vanilla surrogate alone, a run with any"
REFUSED_AS_LOSS = ("k1", "kl")
REFUSED_AS_ADVANTAGE = ("k2", "mse", "forward_kl_topk")


def _config_validation(meta: Meta) -> Iterator[Comparison]:
    """Which configurations are refused; taken out of `meta`, so that only one case has them."""
    entries = meta.pop("config_validation", []) if isinstance(meta, dict) else []
    for entry in entries:
        config, result = entry["config"], entry["result"]
        mode = config.get("loss_mode", VERL_LOSS_MODE)
        by_gradient = config.get("use_policy_gradient", False)
        deliberate = None
        if "policy_loss_mode" in config:
            deliberate = Deliberate(reason=SURROGATES, expected="accepted")
        elif result == "accepted" and mode in (
            REFUSED_AS_ADVANTAGE if by_gradient else REFUSED_AS_LOSS
        ):
            deliberate = Deliberate(reason="ALGORITHMS 9 items 7 and 8, 7.1", expected="refused")
        yield Comparison(
            name=f"validation of {config}",
            ours=_validated(config),
            reference="accepted" if result == "accepted" else "refused",
            deliberate=deliberate,
        )


def _validated(config: Mapping[str, Any]) -> str:
    try:
        if "policy_loss_mode" in config:
            HindsightOpd.model_validate({"surrogate": config["policy_loss_mode"]})
        check_loss_mode(
            config.get("loss_mode", VERL_LOSS_MODE),
            use_policy_gradient=config.get("use_policy_gradient", False),
        )
    except ValueError:
        return "refused"
    return "accepted"


def _named(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _metric_value(value: Any) -> float:
    if not isinstance(value, Mapping):
        return value
    (number,) = value["metric_value"]
    return number


def openclaw_combine_loss(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Advantages, loss, gradient of the packed logits and the reported terms.

    The reference's reduction is a sum over samples of their means, divided elsewhere.
    """
    inputs, config, outputs = case["inputs"], case["config"], case["outputs"]
    lengths = inputs["response_lengths"]
    prompts = [t - r for t, r in zip(inputs["total_lengths"], lengths, strict=True)]
    rows = _response_rows(prompts, lengths)
    logits = inputs["logits"].detach().clone().requires_grad_()
    logits_BTV = _padded(logits, rows)
    tokens_BT = _padded(torch.as_tensor(inputs["tokens_packed"]).roll(-1), rows)
    values = {
        name: _by_sample(inputs[name], lengths)
        for name in ("old_log_probs", "rollout_log_probs", "teacher_log_probs", "ref_log_probs")
    }
    rewards_BT = _by_sample(inputs["grpo_advantages"], lengths)
    mask_BT = _by_sample(inputs["loss_masks"], lengths)
    found = logprobs_of(logits_BTV, tokens_BT)
    assert found.entropy_N is not None
    logprobs_BT = found.logprobs.reshape(tokens_BT.shape)
    real_BT = _by_sample(torch.ones_like(inputs["loss_masks"]), lengths)
    # The reference's own reading: every sample counts as taught.
    advantages_BT = combined_advantages(
        values["teacher_log_probs"],
        values["old_log_probs"],
        rewards_BT,
        real_BT,
        real_BT,
        opd_coef=config["w_opd"],
        reward_coef=config["w_rl"],
    )
    batch = token_batch(
        logprobs_BT,
        mask_BT,
        old_BT=values["old_log_probs"],
        teacher_BT=values["teacher_log_probs"],
        rollout_BT=values["rollout_log_probs"],
        reference_BT=values["ref_log_probs"],
        entropy_BT=found.entropy_N.reshape(tokens_BT.shape),
        rewards_BT=rewards_BT,
    )
    options = HindsightOpd(
        opd_coef=config["w_opd"],
        reward_coef=config["w_rl"],
        clip_low=config["eps_clip"],
        clip_high=config["eps_clip_high"],
    )
    result = loss_of(batch, options, _regularised(config), turns=1)
    ours = {**result.reduced, "loss": result.loss}
    (gradient,) = torch.autograd.grad(ours["loss"], logits)
    reference = outputs["combined_advantages"]
    yield Comparison(
        name="new_log_probs", ours=_packed(logprobs_BT, lengths), reference=inputs["new_log_probs"]
    )
    yield Comparison(
        name="combined_advantages", ours=_packed(advantages_BT, lengths), reference=reference
    )
    yield Comparison(name="loss", ours=ours["loss"], reference=outputs["loss"])
    yield Comparison(name="grad_logits", ours=gradient, reference=outputs["grad_logits"])
    for name, reported in outputs["reported"].items():
        yield Comparison(
            name=name, ours=ours.get(name), reference=reported, tolerance=METRIC_TOLERANCE
        )
    yield from _without_leak(case, values, rewards_BT, real_BT)


def _regularised(config: Mapping[str, Any]) -> LossSettings:
    """The KL to the start and the entropy; a run refuses k1 as a loss, the reference does not."""
    settings = LossSettings(
        beta_kl=config["kl_loss_coef"], beta_entropy=config["entropy_coef"], kl_type="k2"
    )
    object.__setattr__(settings, "estimator", canonical_kl_name(config["kl_loss_type"]))
    return settings


def _without_leak(
    case: Case, values: Mapping[str, Tensor], rewards_BT: Tensor, real_BT: Tensor
) -> Iterator[Comparison]:
    """Samples that the reference gave the engine's log-probs as a teacher's have no teacher."""
    config, lengths = case["config"], case["inputs"]["response_lengths"]
    same_BT = (values["teacher_log_probs"] == values["rollout_log_probs"]) | (real_BT == 0)
    opd_valid_BT = (~same_BT.all(dim=-1, keepdim=True)).to(real_BT.dtype).expand_as(real_BT)
    if bool((opd_valid_BT > 0).all()):
        return
    ours, rewards_alone = (
        combined_advantages(
            values["teacher_log_probs"],
            values["old_log_probs"],
            rewards_BT,
            valid_BT,
            real_BT,
            opd_coef=config["w_opd"],
            reward_coef=config["w_rl"],
        )
        for valid_BT in (opd_valid_BT, torch.zeros_like(opd_valid_BT))
    )
    reference = case["outputs"]["combined_advantages"]
    taught = _packed(opd_valid_BT, lengths) > 0
    yield Comparison(
        name="combined_advantages without the engine's gap",
        ours=_packed(ours, lengths),
        reference=reference,
        deliberate=Deliberate(
            reason="ALGORITHMS 9 item 5",
            expected=torch.where(taught, reference, _packed(rewards_alone, lengths)),
        ),
    )


def opd_advantage_replacement(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Raw and normalised replacement of each entry, and who is eligible."""
    for index, entry in enumerate(map(decode, case["cases"])):
        inputs, outputs = entry["inputs"], entry["outputs"]
        ours = _replaced(inputs)
        for name, reference in outputs.items():
            label = f"{entry.get('name', index)}: {name}"
            yield Comparison(name=label, ours=ours.get(name), reference=reference)
    for entry in case["eligibility"]:
        rewards = torch.tensor(entry["rewards"], dtype=torch.float64)
        pass_rates = group_pass_rates(rewards, group_ids(["prompt"] * len(rewards)))
        eligible = eligible_samples(rewards, pass_rates, pass_rate_threshold=entry["threshold"])
        label = f"rewards {entry['rewards']} at {entry['threshold']}"
        yield Comparison(
            name=f"{label}: pass_rate", ours=pass_rates[0], reference=entry["pass_rate"]
        )
        yield Comparison(name=label, ours=eligible.tolist(), reference=entry["eligible"])


def _replaced(inputs: Case) -> dict[str, Any]:
    """Advantages of a run that lets the teacher's replace the reward's, each turn a row, as they
    are and normalised, and the statistics of the latter.
    """
    mask_BT, student_BT = inputs["response_mask"], inputs["student_log_probs"]
    ours: dict[str, Any] = {}
    for name, is_normalised in (("raw_replacement", False), ("normalised_replacement", True)):
        options = HindsightOpd(
            mix="replace",
            pass_rate_threshold=0.5,
            reward_coef=1.0,
            horizon=inputs["horizon"],
            normalise=is_normalised,
        )
        # A row's tokens are the turn's response.
        kept = [row > 0 for row in mask_BT]
        views = [
            view_turn(
                sample(random_ids(NUMBERS, 1), random_ids(NUMBERS, int(used.sum()))),
                Taught(logprobs=teacher[used], support=None, candidate=0),
                reward_advantage=1.0,
                eligible=bool(eligible),
                version_gap=0,
                options=options,
                hold_weight=1.0,
            )
            for used, teacher, eligible in zip(
                kept, inputs["teacher_log_probs"], inputs["eligible"], strict=True
            )
        ]
        before = [
            TurnScores(logprobs=row[used], logprobs_sampled=row[used])
            for row, used in zip(student_BT, kept, strict=True)
        ]

        def rows(values: list[Tensor], mask_BT: Tensor = mask_BT) -> Tensor:
            return torch.zeros_like(mask_BT).masked_scatter(mask_BT > 0, torch.cat(values))

        batch = token_batch(
            student_BT,
            mask_BT,
            teacher_BT=inputs["teacher_log_probs"],
            rewards_BT=rows([view.reward_advantage for view in views]) * inputs["rl_advantages"],
            valid_BT=rows([view.opd_valid for view in views]),
        )
        statistics = batch_statistics(options, views, before)
        clean, _ = select_finite(replace(batch, statistics=statistics))
        ours[name] = advantages(clean, options)
        for statistic, value in (("mean", statistics.gap_mean), ("std", statistics.gap_std)):
            ours[f"opd_{statistic}"] = torch.tensor(value, dtype=torch.float64)
    return ours


def _response_rows(prompt_lens: Sequence[int], response_lens: Sequence[int]) -> list[range]:
    """The packed rows of each response: the row at i scores token i + 1."""
    rows: list[range] = []
    end = 0
    for prompt, response in zip(prompt_lens, response_lens, strict=True):
        end += int(prompt) + int(response)
        rows.append(range(end - int(response) - 1, end - 1))
    return rows


def _padded(packed: Tensor, rows: Sequence[range]) -> Tensor:
    return pad_sequence([packed[list(row)] for row in rows], batch_first=True)


def _by_sample(values: Tensor, lengths: Sequence[int]) -> Tensor:
    return pad_sequence(list(torch.split(values, list(lengths))), batch_first=True)


def _packed(values_BT: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(values_BT, lengths, strict=True)])


def _select(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    values_BT = values_BT[:, : mask_BT.shape[1]]
    return torch.where(mask_BT > 0, values_BT, torch.zeros_like(values_BT))


MAPS: dict[str, GoldenMap] = {
    "verl091_distillation_ppo_loss": verl_distillation_ppo_loss,
    "openclaw_combine_loss": openclaw_combine_loss,
    "opd_advantage_replacement": opd_advantage_replacement,
}
