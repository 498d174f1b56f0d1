"""Batches of ready samples with scores that lie near a model's own, as a run's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from records.lessons.names import LessonKind
from records.types import ReadySample, SessionOutcome, Teaching
from rollout_bridge.merging import PackedSequence, merge_turns
from tests.rollout_bridge.separate import separate_turns
from tests.trainer.tiny import conversation
from trainer.batch.collate import build_micro_batch, score_batches
from trainer.batch.side_sampling import with_side_samples
from trainer.batch.views import TeachingPlan
from trainer.config import TrainerConfig
from trainer.model.policy import Policy

TOP_K = 8
TEACHER_GAP = 0.7
ENGINE_GAP = 0.3
SIDE: dict[str, dict[str, Any]] = {
    "side_samples": {"objective": {"name": "side_samples", "samples": 6}},
    "side_samples_old": {
        "objective": {
            "name": "side_samples",
            "samples": 6,
            "advantage_reference": "old",
            "clip": 0.2,
        }
    },
    "side_samples_with_rewards": {
        "objective": {"name": "side_samples", "samples": 6, "reward_coef": 0.5}
    },
    "finite_cache": {"objective": {"name": "sparse_kl", "topk": 6}},
    "finite_cache_clipped": {
        "objective": {"name": "sparse_kl", "topk": 6, "direction": "policy_gradient"}
    },
}
"""Objectives whose support is stored with each turn."""
LESSONS = (None, LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP)


def samples_of(policy: Policy, *, temperatures: Sequence[float] = (1.0,)) -> list[ReadySample]:
    """Eight turns of three sessions: some extend each other, one was dropped between two."""
    turns = [
        *conversation("a", [(9, 5), (4, 3), (6, 7)], seed=1),
        *conversation("b", [(12, 4), (3, 6), (5, 2), (2, 9)], seed=2, skip=(1,)),
        *conversation("c", [(7, 11), (8, 1)], seed=3),
    ]
    heated = [
        replace(turn, temperature=temperatures[index % len(temperatures)])
        for index, turn in enumerate(turns)
    ]
    return [_scored(turn, index, policy) for index, turn in enumerate(heated)]


def with_lessons(samples: list[ReadySample]) -> list[ReadySample]:
    """Every kind, one after the other; they are merged into rows like turns."""
    return [
        replace(sample, lesson=LESSONS[place % len(LESSONS)])
        for place, sample in enumerate(samples)
    ]


def with_outcomes(samples: Sequence[ReadySample]) -> list[ReadySample]:
    """Turns of sessions that began alike and ended differently, each turn's state valued."""
    sessions = list(dict.fromkeys(one.session_id for one in samples))
    generator = np.random.default_rng(7)
    found = {}
    for place, name in enumerate(sessions):
        turns = [one for one in samples if one.session_id == name]
        values = tuple((one.turn_id, float(generator.uniform())) for one in turns)
        outcome = place / max(len(sessions) - 1, 1)
        found[name] = SessionOutcome(outcome=outcome, values=values, start="one task")
    return [
        replace(one, reward=0.0, session=found[one.session_id], step_index=place % 3)
        for place, one in enumerate(samples)
    ]


def with_drawn(
    samples: Sequence[ReadySample], sampler: Policy, config: TrainerConfig
) -> list[ReadySample]:
    """With the side samples that the objective needs, as the scoring stage stores them: by an older
    policy, `sampler`, and a teacher near it.
    """
    plan = TeachingPlan(
        options=config.objective,
        model=None,
        vocab_size=sampler.vocab_size,
        max_tokens=256,
        device="cpu",
        side_source=config.side_source,
    )
    torch.manual_seed(11)
    generator = np.random.default_rng(11)
    found = []
    for one in with_side_samples(samples, sampler, plan):
        side = one.side_samples
        assert side is not None
        gaps = generator.normal(scale=TEACHER_GAP, size=side.ids.shape).astype(np.float32)
        taught = replace(side, teacher_logprobs=side.rollout_logprobs + gaps)
        found.append(replace(one, side_samples=taught))
    return found


def rows_of(samples: Sequence[ReadySample], *, merged: bool) -> list[PackedSequence]:
    """One sequence a conversation, or one a turn."""
    return merge_turns(samples) if merged else separate_turns(samples)


def _scored(sample: ReadySample, seed: int, policy: Policy) -> ReadySample:
    generator = np.random.default_rng(100 + seed)
    batch = build_micro_batch(separate_turns([sample]), "cpu", [sample.temperature])
    own = score_batches(policy, [batch], top_k=policy.vocab_size)[0]
    length = len(sample.response_ids)
    assert own.topk_ids is not None
    assert own.topk is not None
    # The teacher's distribution: the model's, with noise on every token.
    noise = torch.from_numpy(generator.normal(scale=TEACHER_GAP, size=own.topk.shape))
    teacher = torch.log_softmax(own.topk.double() + noise, dim=-1)
    best = torch.topk(teacher, TOP_K, dim=-1)
    sampled = (own.topk_ids == torch.from_numpy(sample.response_ids).long().unsqueeze(-1)).double()
    teaching = Teaching(
        candidate=0,
        hint=sample.hint,
        teacher="test",
        teacher_version="0",
        hinted_prompt_ids=sample.prompt_ids,
        teacher_logprobs=(teacher * sampled).sum(dim=-1).float().numpy(),
        topk_ids=own.topk_ids.gather(-1, best.indices).numpy().astype(np.int32),
        topk_logprobs=best.values.float().numpy(),
    )
    gaps = generator.normal(scale=ENGINE_GAP, size=length)
    rewards = (1.0, -1.0, None, 1.0)
    assert teaching.teacher_logprobs is not None
    return replace(
        sample,
        rollout_logprobs=(own.logprobs_sampled.numpy() + gaps).astype(np.float32),
        teacher_logprobs=teaching.teacher_logprobs,
        teachings=(teaching,),
        reward=rewards[seed % len(rewards)],
        step_index=seed % 3,
        after_tool=seed % 2 == 1,
    )
