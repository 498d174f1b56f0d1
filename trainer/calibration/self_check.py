"""Before training: a teacher that is the student itself must teach nothing (ALGORITHMS 7.7).

The whole path of an update runs on fixed sequences, without a step: supports, corrections,
objective. If student and teacher differ by a position, a temperature or a mask, the loss is not
zero. It knows no store and no engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from records.names import SideSource
from records.types import Ids, ReadySample, Teaching, VersionSpan
from trainer.batch.side_sampling import lacks_side_samples, with_side_samples
from trainer.errors import DistillationOffError
from trainer.objectives.options import HindsightOpd
from trainer.step.update import Updater

SHARE_OF_PROMPT = 0.5


def self_check(updater: Updater, sequences: Sequence[Ids], bound: float) -> float:
    """The larger of |loss| and mean |teacher - student| with the policy as teacher; weights stay.

    Each sequence's second half is taken as the response. Raises DistillationOffError above `bound`
    (nats).
    """
    options = updater.options
    if isinstance(options, HindsightOpd) and options.opd_coef == 0:
        return 0.0
    # A model in the trainer needs no tokens of the weights that sampled a turn: there is no age.
    source = updater.plan.side_source
    source = None if source is SideSource.POLICY_TOP else source
    plan = replace(updater.plan, model=updater.policy, side_source=source)
    samples = [_sample(number, ids) for number, ids in enumerate(sequences) if len(ids) >= 4]
    if any(lacks_side_samples(sample, plan) for sample in samples):
        samples = with_side_samples(samples, updater.policy, plan)
    total = updater.rehearse(samples, plan)
    gap = total.mean_gap
    worst = max(abs(total.reduced["opd/kl_loss"]), gap)
    if not worst <= bound:
        raise DistillationOffError(
            f"objective {options.name!r} with the policy as its own teacher gives a loss of "
            f"{total.reduced['opd/kl_loss']:.2e} and a mean |teacher - student| of {gap:.2e}; both "
            f"must be 0 within {bound:.0e}: teacher and student are not compared on equal terms"
        )
    return worst


def _sample(number: int, ids: Ids) -> ReadySample:
    split = max(1, int(len(ids) * SHARE_OF_PROMPT))
    prompt, response = ids[:split], ids[split:]
    unknown = np.full(len(response), np.nan, dtype=np.float32)
    return ReadySample(
        turn_id=f"self-check-{number}",
        session_id=f"self-check-{number}",
        prompt_ids=prompt,
        response_ids=response,
        # Not comparable: no engine sampled them.
        rollout_logprobs=np.zeros(len(response), dtype=np.float32),
        teacher_logprobs=unknown,
        temperature=0.0,
        distribution_modified="temperature_0",
        version_spans=(VersionSpan(version=0, start=0, end=len(response)),),
        hint="",
        created_at=0.0,
        teachings=(
            Teaching(
                candidate=0,
                hint="",
                teacher="self",
                teacher_version="",
                hinted_prompt_ids=prompt,
            ),
        ),
    )
