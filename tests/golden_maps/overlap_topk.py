"""Overlap-guided top-k distillation: `openclaw_v2_overlap_topk_opd`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.golden_maps.check import Case, Comparison, GoldenMap, Meta
from tests.trainer.live import support_logprobs
from trainer.objectives.distributions.overlap_topk import choose_support, overlap_topk
from trainer.objectives.hint_choice import choose_hints, count_overlap, take_chosen


def overlap_topk_opd(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Hint choice, support, loss, gradient and reports."""
    inputs, options, outputs = case["inputs"], case["kwargs"], case["outputs"]
    student_ids = inputs["old_topk_ids"].long()
    candidate_ids = inputs["cand_teacher_topk_ids"].long()
    overlap = count_overlap(student_ids, candidate_ids)
    choice = choose_hints(
        overlap, options["hint_selection"], step_spans=options["step_token_spans"]
    )
    teacher = take_chosen(inputs["cand_teacher_log_probs_full"], choice.candidates_T)
    support = choose_support(
        student_ids, take_chosen(candidate_ids, choice.candidates_T), options["subset_mode"]
    )
    logits = inputs["current_logits"].clone().requires_grad_()
    terms = overlap_topk(
        support_logprobs(logits, support.ids),
        torch.gather(inputs["old_log_probs_full"], -1, support.ids),
        torch.gather(teacher, -1, support.ids),
        support.valid,
        difference_clip=options["diff_clip"],
        clip_low=options["eps_lo"],
        clip_high=options["eps_hi"],
    )
    terms.loss.sum().backward()
    ours = {
        "overlap": overlap,
        "k_star": choice.candidates_T,
        "per_token_loss": terms.loss,
        "per_token_clipfrac": terms.clipped,
        "per_token_absdiff": terms.difference,
        "row_valid": (terms.size > 0).to(terms.size.dtype),
        "grad_current_logits_of_sum": logits.grad,
    }
    for name, reference in outputs.items():
        yield Comparison(name=name, ours=ours[name], reference=reference)


MAPS: dict[str, GoldenMap] = {"openclaw_v2_overlap_topk_opd": overlap_topk_opd}
