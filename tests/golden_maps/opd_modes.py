"""OPD's modes and advantages: `verl091_distillation_ppo_loss`, `openclaw_combine_loss`,
`opd_advantage_replacement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
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
from trainer.objectives.advantage import distillation_advantage
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.distributions.distillation_modes import (
    DistillationSettings,
    distillation_metrics,
    distillation_terms,
    estimator_divergence,
    policy_metrics,
    policy_terms,
    total_loss,
)
from trainer.objectives.distributions.forward_kl import (
    ForwardKlTerms,
    forward_kl_metrics,
    forward_kl_topk,
)
from trainer.objectives.distributions.gather import (
    support_logprobs,
    token_logprobs_of,
    top_k_logprobs,
)
from trainer.objectives.distributions.kl import kl_estimate
from trainer.objectives.normalise import normalise
from trainer.objectives.policy.combined import combined_advantages, regularised_loss
from trainer.objectives.policy.eligibility import eligible_samples, horizon_mask, replace_advantages
from trainer.objectives.policy.ppo import ppo_clip
from trainer.objectives.validation import TOPK_MODES, check_loss_mode, check_policy_loss_mode
from trainer.rewards.groups import group_ids, group_pass_rates

VERL_DUAL_CLIP = 3.0


def verl_distillation_ppo_loss(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss, gradient of the packed logits and every metric of both branches."""
    inputs, outputs = case["inputs"], case["outputs"]
    settings = _distillation_settings(case["config"])
    is_topk = settings.loss_mode in TOPK_MODES
    tolerance = FLOAT32_INSIDE_TOLERANCE if is_topk else None
    logits = inputs["student_logits_packed"].detach().clone().requires_grad_()
    rows = _response_rows(inputs["prompt_lens"], inputs["response_lens"])
    logits_BTV = _padded(logits, rows)
    tokens_BT = _padded(torch.as_tensor(inputs["token_ids_packed"]).roll(-1), rows)
    width = logits_BTV.shape[1]
    mask_BT = inputs["response_mask"].to(logits.dtype)[:, :width]
    logprobs_BT = token_logprobs_of(logits_BTV, tokens_BT.long())
    old_BT = inputs["old_log_probs"][:, :width]
    correction = inputs.get("rollout_is_weights")
    correction_BT = None if correction is None else correction[:, :width]
    aggregation_BT = token_weights(
        mask_BT,
        case["config"]["loss_agg_mode"],
        horizon=case["config"].get("loss_scale_factor", inputs["response_mask"].shape[-1]),
    )
    support = _support_terms(case["config"], inputs, logits_BTV, rows) if is_topk else None
    if support is None:
        teacher_BT = _padded(inputs["teacher_log_probs_packed"], rows)
        divergence_BT = estimator_divergence(settings.loss_mode, logprobs_BT, teacher_BT, mask_BT)
    else:
        divergence_BT = support.loss.to(logits.dtype)
    terms = distillation_terms(
        divergence_BT, logprobs_BT, old_BT, mask_BT, settings, rollout_weights_BT=correction_BT
    )
    task = policy_terms(
        inputs["advantages"][:, :width],
        logprobs_BT,
        old_BT,
        mask_BT,
        settings,
        rollout_weights_BT=correction_BT,
    )
    task_loss = weighted_sum(task.loss, aggregation_BT)
    loss = total_loss(weighted_sum(terms.loss, aggregation_BT), task_loss, settings)
    (gradient,) = torch.autograd.grad(loss, logits)
    ours = _named(
        "distillation",
        distillation_metrics(terms, mask_BT, aggregation_BT, is_estimator=support is None),
    )
    if support is not None:
        ours |= _named(
            "distillation",
            forward_kl_metrics(support, mask_BT, support_size=case["config"]["topk"]),
        )
    # Without task rewards and without policy gradient the reference has no task loss to report.
    if settings.use_task_rewards or settings.use_policy_gradient:
        ours |= _named("actor", policy_metrics(task, mask_BT) | {"pg_loss": task_loss})
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
            ours=torch.where(mask_BT > 0, logprobs_BT, torch.zeros_like(logprobs_BT)),
            reference=_select(case["intermediate"]["student_log_probs_padded"], mask_BT),
        )
    references = {name: _metric_value(value) for name, value in outputs["metrics"].items()}
    yield Comparison(name="metric names", ours=sorted(ours), reference=sorted(references))
    for name, reference in references.items():
        yield Comparison(
            name=name, ours=ours.get(name), reference=reference, tolerance=METRIC_TOLERANCE
        )
    yield from _config_validation(meta)


REFUSED_AS_LOSS = ("k1", "kl")
REFUSED_AS_ADVANTAGE = ("k2", "mse", "forward_kl_topk")


def _config_validation(meta: Meta) -> Iterator[Comparison]:
    """Which configurations are refused; taken out of `meta`, so that only one case has them."""
    entries = meta.pop("config_validation", []) if isinstance(meta, dict) else []
    for entry in entries:
        config, result = entry["config"], entry["result"]
        mode = config.get("loss_mode", DistillationSettings().loss_mode)
        by_gradient = config.get("use_policy_gradient", False)
        refused = Deliberate(reason="ALGORITHMS 9 items 7 and 8, 7.1", expected="refused")
        is_hole = result == "accepted" and mode in (
            REFUSED_AS_ADVANTAGE if by_gradient else REFUSED_AS_LOSS
        )
        yield Comparison(
            name=f"validation of {config}",
            ours=_validated(config),
            reference="accepted" if result == "accepted" else "refused",
            deliberate=refused if is_hole else None,
        )


def _validated(config: Mapping[str, Any]) -> str:
    try:
        if "policy_loss_mode" in config:
            check_policy_loss_mode(config["policy_loss_mode"])
        check_loss_mode(
            config.get("loss_mode", DistillationSettings().loss_mode),
            use_policy_gradient=config.get("use_policy_gradient", False),
        )
    except ValueError:
        return "refused"
    return "accepted"


def _distillation_settings(config: Mapping[str, Any]) -> DistillationSettings:
    return DistillationSettings(
        loss_mode=config["loss_mode"],
        use_policy_gradient=config["use_policy_gradient"],
        use_task_rewards=config["use_task_rewards"],
        coef=config["distillation_loss_coef"],
        loss_max_clamp=config["loss_max_clamp"],
        clip_low=config["clip_ratio_low"],
        clip_high=config["clip_ratio_high"],
        dual_clip=config.get("clip_ratio_c", VERL_DUAL_CLIP),
    )


def _support_terms(
    config: Mapping[str, Any], inputs: Case, logits_BTV: Tensor, rows: Sequence[range]
) -> ForwardKlTerms:
    ids_BTK = _padded(inputs["teacher_topk_ids_packed"], rows).long()
    student_ids_BTK, _ = top_k_logprobs(logits_BTV.detach(), config["topk"])
    return forward_kl_topk(
        support_logprobs(logits_BTV, ids_BTK),
        _padded(inputs["teacher_topk_log_probs_packed"], rows),
        student_ids_BTK,
        ids_BTK,
        config["log_prob_min_clamp"],
    )


def _named(prefix: str, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
    logprobs_BT = token_logprobs_of(logits_BTV, tokens_BT.long())
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
    turn_ids_BT = torch.arange(len(lengths)).unsqueeze(-1).expand(mask_BT.shape)
    weights_BT = token_weights(
        mask_BT, "turn-mean-token-mean", turn_ids_BT=turn_ids_BT, num_turns=1
    )
    policy = ppo_clip(
        logprobs_BT,
        _select(values["old_log_probs"], mask_BT),
        _select(advantages_BT, mask_BT),
        clip_low=config["eps_clip"],
        clip_high=config["eps_clip_high"],
    )
    reference_BT = _select(values["ref_log_probs"], mask_BT)
    kl_BT = kl_estimate(config["kl_loss_type"], logprobs_BT, reference_BT)
    gap_BT = distillation_advantage(values["old_log_probs"], values["rollout_log_probs"]).abs()
    ours = {
        "pg_loss": weighted_sum(policy.loss, weights_BT),
        "kl_loss": weighted_sum(kl_BT, weights_BT),
        "entropy_loss": weighted_sum(Categorical(logits=logits_BTV).entropy(), weights_BT),
        "pg_clipfrac": weighted_sum(policy.clipped, weights_BT),
        "ppo_kl": weighted_sum(policy.kl, weights_BT),
        "train_rollout_logprob_abs_diff": weighted_sum(gap_BT, weights_BT),
    }
    ours["loss"] = regularised_loss(
        ours["pg_loss"],
        ours["kl_loss"],
        ours["entropy_loss"],
        beta_kl=config["kl_loss_coef"],
        beta_entropy=config["entropy_coef"],
    )
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
        mask_BT = inputs["response_mask"]
        gap_BT = distillation_advantage(inputs["teacher_log_probs"], inputs["student_log_probs"])
        in_horizon_BT = horizon_mask(mask_BT, inputs["horizon"])
        eligible_BT = inputs["eligible"].unsqueeze(-1)
        normalised = normalise(gap_BT, in_horizon_BT * eligible_BT)
        ours = {"opd_mean": normalised.mean, "opd_std": normalised.std}
        for name, opd_BT in (
            ("raw_replacement", gap_BT),
            ("normalised_replacement", normalised.values),
        ):
            ours[name] = replace_advantages(
                opd_BT,
                inputs["rl_advantages"],
                mask_BT,
                eligible_BT=eligible_BT,
                in_horizon_BT=in_horizon_BT,
            )
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
