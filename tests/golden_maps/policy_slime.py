"""slime's losses per token, masks and weights: `slime_policy_loss_family`.

Its tensors are flat; `seq_lens` cut them into sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.golden_maps.check import Case, Comparison, Deliberate, Meta
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.distributions.kl import kl_estimate
from trainer.objectives.policy.cispo import cispo
from trainer.objectives.policy.combined import combined_advantages
from trainer.objectives.policy.gspo import gspo
from trainer.objectives.policy.icepop import icepop_weights
from trainer.objectives.policy.opsm import opsm_mask
from trainer.objectives.policy.ppo import PpoTerms, ppo_clip
from trainer.objectives.policy.pure_is import pure_is
from trainer.objectives.policy.truncated_is import TruncatedWeights, truncated_weights

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
    weights = truncated_weights(
        inputs["train_log_probs"],
        inputs["rollout_log_probs"],
        cap=kwargs["tis_clip"],
        lower=kwargs.get("tis_clip_low", 0.0),
    )
    yield from _weighted(inputs, weights, outputs)


def _icepop(inputs: Values, kwargs: Values, outputs: Values) -> Iterator[Comparison]:
    weights = icepop_weights(
        inputs["train_log_probs"],
        inputs["rollout_log_probs"],
        lower=kwargs.get("tis_clip_low", 0.0),
        upper=kwargs["tis_clip"],
    )
    yield from _weighted(inputs, weights, outputs)


def _weighted(inputs: Values, weights: TruncatedWeights, outputs: Values) -> Iterator[Comparison]:
    """With advantage -1 the loss of REINFORCE is what stands for its log-probs, weighted."""
    given = inputs["pg_loss"]
    loss = pure_is(given, torch.full_like(given, -1.0), weights.weights)
    yield Comparison(name="pg_loss", ours=loss, reference=outputs["pg_loss"])
    ours = {"tis": weights.ratio, "tis_clipfrac": weights.capped, "tis_abs": weights.distance}
    for name, value in outputs["metrics"].items():
        yield Comparison(name=name, ours=ours[name], reference=value)


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
