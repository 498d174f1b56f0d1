"""slime's losses per token, masks and weights: `slime_policy_loss_family`.

Its tensors are flat; `seq_lens` cut them into sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.golden_maps.check import Case, Comparison, Deliberate, Meta
from tests.trainer.live import loss_of, token_batch
from trainer.objectives.batch import TokenBatch, token_weights, weighted_sum
from trainer.objectives.distributions.kl import comparable_ratio, kl_estimate
from trainer.objectives.frame import LossSettings
from trainer.objectives.options import HindsightOpd
from trainer.objectives.policy.cispo import cispo
from trainer.objectives.policy.gspo import gspo
from trainer.objectives.policy.opsm import opsm_mask
from trainer.objectives.policy.policy_gradient import combined_advantages
from trainer.objectives.policy.ppo import PpoTerms, ppo_clip, pure_is
from trainer.objectives.rollout_correction.correct import correct_rollout
from trainer.objectives.rollout_correction.settings import RolloutCorrectionSettings

GARBAGE = "ALGORITHMS 0.1: values at mask 0 reach no output"

Values = Mapping[str, Any]


def policy_losses(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Every output of the function that the case names."""
    yield from FUNCTIONS[case["fn"]](case["inputs"], case["kwargs"], case["outputs"])


def _ppo(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    leaf = inputs["log_probs"].clone().requires_grad_()
    terms = ppo_clip(
        leaf,
        inputs["old_log_probs"],
        inputs["advantages"],
        clip_low=kwargs["eps_clip"],
        clip_high=kwargs["eps_clip_high"],
        dual_clip=kwargs.get("eps_clip_c"),
    )
    yield from _per_token(terms, leaf, outputs)


def _cispo(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    leaf = inputs["log_probs"].clone().requires_grad_()
    terms = cispo(
        leaf,
        inputs["old_log_probs"],
        inputs["advantages"],
        clip_low=kwargs["eps_clip"],
        clip_high=kwargs["eps_clip_high"],
    )
    yield from _per_token(terms, leaf, outputs)


def _per_token(terms: PpoTerms, leaf: Tensor, outputs: Values) -> Iterator[Comparison]:
    (grad,) = torch.autograd.grad(terms.loss.sum(), leaf)
    ours = {"pg_losses": terms.loss, "clipfrac": terms.clipped, "grad_log_probs_of_sum": grad}
    for name, value in outputs.items():
        yield Comparison(name=name, ours=ours[name], reference=value)


def _opsm(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    rows = {name: _rows(tensor, kwargs["seq_lens"]) for name, tensor in inputs.items()}
    mask = rows["loss_masks"]
    ours = opsm_mask(
        rows["log_probs"],
        rows["old_log_probs"],
        rows["advantages"],
        mask,
        delta=kwargs["opsm_delta"],
    )
    used = mask > 0
    reference = _rows(outputs["opsm_mask"], kwargs["seq_lens"])
    yield Comparison(name="opsm_mask", ours=ours.keep_BT[used], reference=reference[used])
    sums = token_weights(mask, "seq-mean-token-mean", num_sequences=1)
    # The reference counts what it masks at mask 0 too, where the loss has no token.
    masked = kl_estimate("abs", ours.keep_BT, torch.ones_like(ours.keep_BT))
    counted = weighted_sum(masked, sums)
    yield Comparison(
        name="opsm_clipfrac",
        ours=weighted_sum(ours.share_BT, sums),
        reference=outputs["opsm_clipfrac"],
        deliberate=Deliberate(reason=GARBAGE, expected=counted),
    )


def _gspo_kl(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    rows = {name: _rows(tensor, kwargs["seq_lens"]) for name, tensor in inputs.items()}
    terms = gspo(
        rows["log_probs"],
        rows["old_log_probs"],
        torch.ones_like(rows["log_probs"]),
        rows["loss_masks"],
        clip_low=0.2,
        clip_high=0.2,
        form="sequence",
    )
    ours = {"ppo_kl": terms.kl, "ratio": terms.ratio}
    for name, value in outputs.items():
        flat = _flat(ours[name], kwargs["seq_lens"])
        yield Comparison(name=name, ours=flat, reference=value)


def _tis(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    """No case has a ratio below `tis_clip_low`, which a run does not have."""
    assert kwargs.get("tis_clip_low", 0.0) <= float(_ratio(inputs).min())
    settings = RolloutCorrectionSettings(
        importance_level="token", importance_upper=kwargs["tis_clip"]
    )
    yield from _weighted(inputs, settings, outputs)


def _icepop(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    settings = RolloutCorrectionSettings(
        importance_level="token",
        importance_upper=kwargs["tis_clip"],
        importance_lower=kwargs.get("tis_clip_low", 0.0),
    )
    yield from _weighted(inputs, settings, outputs)


def _weighted(
    inputs: Values, settings: RolloutCorrectionSettings, outputs: Values
) -> Iterator[Comparison]:
    """With advantage -1 the loss of REINFORCE is what stands for its log-probs, weighted.

    Reports are those of the frame, each token a batch of its own; `tis` is the ratio there, before
    it becomes a weight.
    """
    train, rollout = inputs["train_log_probs"], inputs["rollout_log_probs"]
    everywhere = torch.ones_like(train)
    corrected = correct_rollout(train[None], rollout[None], everywhere[None], settings)
    assert corrected.weights_BT is not None
    weights = corrected.weights_BT[0].to(train.dtype)
    loss = pure_is(inputs["pg_loss"], -everywhere, weights)
    yield Comparison(name="pg_loss", ours=loss, reference=outputs["pg_loss"])
    batch = token_batch(
        train[:, None],
        everywhere[:, None],
        rollout_BT=rollout[:, None],
        weights_BT=weights[:, None],
    )
    reports = [
        loss_of(_row(batch, index), HindsightOpd(), LossSettings(beta_kl=0.0)).reduced
        for index in range(len(train))
    ]
    ours = {
        name: torch.stack([one[name] for one in reports]) for name in ("tis_clipfrac", "tis_abs")
    }
    ours["tis"] = _ratio(inputs)
    for name, value in outputs["metrics"].items():
        yield Comparison(name=name, ours=ours[name], reference=value)


def _ratio(inputs: Values) -> Tensor:
    return comparable_ratio(inputs["train_log_probs"], inputs["rollout_log_probs"])


def _row(batch: TokenBatch, index: int) -> TokenBatch:
    values = {
        one.name: getattr(batch, one.name)[index : index + 1]
        for one in fields(batch)
        if isinstance(getattr(batch, one.name), Tensor)
    }
    return replace(batch, **values)


def _opd_advantages(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    student, teacher = inputs["student_log_probs"], inputs["teacher_log_probs"]
    everywhere = torch.ones_like(student)
    ours = {
        "advantages": combined_advantages(
            teacher,
            student,
            inputs["advantages"],
            everywhere,
            everywhere,
            opd_coef=kwargs["opd_kl_coef"],
        ),
        "opd_reverse_kl": kl_estimate("k1", student, teacher),
    }
    for name, value in outputs.items():
        yield Comparison(name=name, ours=ours[name], reference=value)


def _rows(flat: Tensor, lengths: list[int]) -> Tensor:
    """Sequences as rows [B, T], padded with zeros."""
    return pad_sequence(list(flat.split(lengths)), batch_first=True)


def _flat(rows: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


FUNCTIONS = {
    "compute_policy_loss": _ppo,
    "compute_cispo_loss": _cispo,
    "compute_opsm_mask": _opsm,
    "compute_gspo_kl": _gspo_kl,
    "vanilla_tis_function": _tis,
    "icepop_function": _icepop,
    "apply_opd_kl_to_advantages": _opd_advantages,
}
