"""Other ways to learn from the same objections, offline: a step's samples, and the steps.

    sft        the likelihood of the hinted teacher's own answers at the hint's states
    negative   no teacher: a fixed negative advantage on the least likely quarter of the tokens of
               answers that were objected to, clipped (arXiv 2608.31046)
    binary     no teacher: -1 on answers that were objected to, +1 on those that were not, clipped
               (OpenClaw's verdicts)
    contrast   fresh answers; advantage log q(a | right hint) - log q(a | hint of another kind)
               (arXiv 2606.11709)
    hint-only  fresh answers, the run's own objective, and no counter- and keep-lessons

All train adapters from the run's start model with the run's optimiser, passes and pull towards the
start, with the run's number of steps and samples per step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from benchmarks.own_agent.falls import hints_for
from benchmarks.own_agent.recorded import HintedState, Recorded
from benchmarks.own_agent.scored import Scored, scored
from benchmarks.own_agent.scripted import ALL_HINTS, another_kind
from benchmarks.own_agent.turned import HINTS
from benchmarks.own_agent.wishes import WISHES
from examples.tool_lab.local_generate import RENDERER, LocalGenerator
from records.training.teaching import Teaching
from records.types import Ids, Logprobs, ReadySample, TurnRecord, VersionSpan
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.hinting import hinted_prompt_ids
from trainer.config import TrainerConfig
from trainer.model.policy import Policy, WithoutAdapters
from trainer.objectives.options import ForwardKlTopk, HindsightOpd
from trainer.step.update import Updater

Method = Literal["sft", "negative", "binary", "contrast", "hint-only"]
METHODS: tuple[Method, ...] = get_args(Method)
MAX_TOKENS = 4096
PUNISHED = 0.25
"""Share of an answer's tokens, the least likely ones, that `negative` makes less likely."""


def config_for(method: Method, config: TrainerConfig) -> TrainerConfig:
    """The run's own configuration, with the method's objective."""
    objectives: dict[Method, Any] = {
        "sft": ForwardKlTopk(name="forward_kl_topk", topk=1),
        "negative": HindsightOpd(),
        "binary": HindsightOpd(opd_coef=0.0, reward_coef=1.0),
        "contrast": HindsightOpd(),
        "hint-only": config.objective,
    }
    return config.model_copy(update={"objective": objectives[method], "device": "cpu"})


@dataclass(slots=True, kw_only=True)
class Trainee:
    """A policy with adapters, the start that it came from, and what is drawn from both."""

    method: Method
    policy: Policy
    start: WithoutAdapters
    generator: LocalGenerator
    data: Recorded
    kinds: Sequence[str]
    rng: random.Random
    top_k: int

    def samples(self, count: int) -> list[ReadySample]:
        """The samples of one step."""
        if self.method == "binary":
            return self._by_verdict(count)
        if self.method == "negative":
            return self._punished(count)
        chosen = drawn(self.rng, self.data.hinted, count)
        hinted = [self.prompt_with(state.turn, state.hint) for state in chosen]
        if self.method == "sft":
            return self._of_teacher(chosen, hinted)
        answers = self.generator.sample_ids([one.turn.prompt_ids for one in chosen], 1.0)
        now = scored(self.policy, rows_of(chosen, answers))
        right = scored(self.start, list(zip(hinted, answers, strict=True)), top_k=self.top_k)
        if self.method == "contrast":
            others = [self.prompt_with(one.turn, self.wrong_hint(one.hint)) for one in chosen]
            wrong = scored(self.start, list(zip(others, answers, strict=True)))
            right = [
                Scored(logprobs=mine.logprobs + good.logprobs - bad.logprobs)
                for mine, good, bad in zip(now, right, wrong, strict=True)
            ]
        parts = zip(chosen, hinted, answers, now, right, strict=True)
        return [
            sample(at, one.turn, answer, mine.logprobs, said, hint=one.hint, hinted=prompt)
            for at, (one, prompt, answer, mine, said) in enumerate(parts)
        ]

    def prompt_with(self, turn: TurnRecord, hint: str) -> Ids:
        """A state's prompt under a hint. Raises HintingError."""
        return hinted_prompt_ids(
            self.generator.rendering, turn.messages, turn.tools, turn.prompt_ids, hint, MAX_TOKENS
        )

    def wrong_hint(self, hint: str) -> str:
        """A hint of another kind."""
        kind = next((k for k in WISHES for v in HINTS[k] if hint in hints_for(k, v)), None)
        if kind is None:
            return self.rng.choice([one for one in ALL_HINTS if one != hint])
        other = another_kind(kind, self.kinds)
        return HINTS[other][WISHES[other].wanted]

    def _of_teacher(
        self, chosen: Sequence[HintedState], hinted: Sequence[Ids]
    ) -> list[ReadySample]:
        model: Any = self.policy.model
        with model.disable_adapter():
            answers = self.generator.sample_ids(hinted, 1.0)
        now = scored(self.policy, rows_of(chosen, answers))
        made = []
        for at, (one, prompt, answer, mine) in enumerate(
            zip(chosen, hinted, answers, now, strict=True)
        ):
            # With all of the teacher's weight on its answer, the forward KL is the likelihood.
            sure = np.zeros(len(answer), dtype=np.float32)
            said = Scored(logprobs=sure, topk_ids=answer[:, None], topk_logprobs=sure[:, None])
            made.append(
                sample(at, one.turn, answer, mine.logprobs, said, hint=one.hint, hinted=prompt)
            )
        return made

    def _punished(self, count: int) -> list[ReadySample]:
        turns = drawn(self.rng, self.data.objected, count)
        now = scored(self.policy, [(turn.prompt_ids, turn.response_ids) for turn in turns])
        return [
            sample(
                at,
                turn,
                turn.response_ids,
                mine.logprobs,
                Scored(logprobs=mine.logprobs - least_likely(mine.logprobs)),
                hint="-",
                hinted=turn.prompt_ids,
            )
            for at, (turn, mine) in enumerate(zip(turns, now, strict=True))
        ]

    def _by_verdict(self, count: int) -> list[ReadySample]:
        judged = [(turn, -1.0) for turn in self.data.objected]
        judged += [(turn, 1.0) for turn in self.data.accepted]
        return [
            sample(at, turn, turn.response_ids, turn.rollout_logprobs, None, reward=reward)
            for at, (turn, reward) in enumerate(drawn(self.rng, judged, count))
        ]


def drawn(rng: random.Random, values: Sequence[Any], count: int) -> list[Any]:
    """`count` of them, each equally often as far as possible, in any order."""
    if not values:
        raise ValueError("the run has recorded nothing that this method could learn from")
    whole = list(values) * (count // len(values))
    return whole + rng.sample(list(values), count - len(whole))


def rows_of(chosen: Sequence[HintedState], answers: Sequence[Ids]) -> list[tuple[Ids, Ids]]:
    """Each state's own prompt with its answer."""
    return [(one.turn.prompt_ids, ids) for one, ids in zip(chosen, answers, strict=True)]


def least_likely(logprobs: Logprobs) -> Logprobs:
    """1 on the least likely quarter of the tokens [R], at least one of them; 0 elsewhere."""
    chosen = np.zeros(len(logprobs), dtype=np.float32)
    chosen[np.argsort(logprobs)[: math.ceil(PUNISHED * len(logprobs))]] = 1.0
    return chosen


def sample(
    number: int,
    turn: TurnRecord,
    answer: Ids,
    logprobs: Logprobs,
    said: Scored | None,
    *,
    hint: str = "",
    hinted: Ids | None = None,
    reward: float | None = None,
) -> ReadySample:
    """An answer at a turn's state, sampled with these log-probs, and its teacher's scores."""
    teachings: tuple[Teaching, ...] = ()
    if said is not None and hinted is not None:
        teachings = (
            Teaching(
                candidate=0,
                hint=hint,
                teacher="start",
                teacher_version="0",
                hinted_prompt_ids=hinted,
                teacher_logprobs=said.logprobs,
                topk_ids=said.topk_ids,
                topk_logprobs=said.topk_logprobs,
            ),
        )
    nothing = np.full(len(answer), np.nan, dtype=np.float32)
    return ReadySample(
        turn_id=f"{number}",
        session_id=f"{number}",
        prompt_ids=turn.prompt_ids,
        response_ids=answer,
        rollout_logprobs=logprobs,
        teacher_logprobs=nothing if said is None else said.logprobs,
        temperature=1.0,
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=len(answer)),),
        hint=hint,
        created_at=0.0,
        reward=reward,
        teachings=teachings,
    )


def trained(
    method: Method, data: Recorded, model: str, kinds: Sequence[str], seed: int
) -> tuple[Policy, list[str]]:
    """The policy after the run's number of steps, and a line about each step."""
    torch.manual_seed(seed)
    config = config_for(method, data.config.trainer)
    policy = Policy.load(
        model,
        device="cpu",
        dtype=config.dtype,
        chunk_tokens=config.logprob_chunk_tokens,
        lora=config.lora,
        seed=seed,
    )
    start = WithoutAdapters(policy)
    trainee = Trainee(
        method=method,
        policy=policy,
        start=start,
        generator=LocalGenerator(policy.model, Rendering.load(model, RENDERER)),
        data=data,
        kinds=kinds,
        rng=random.Random(f"{method}-{seed}"),
        top_k=getattr(config.objective, "topk", 0),
    )
    updater = Updater(policy, start if config.needs_start else None, config)
    said = []
    for step, count in enumerate(data.steps):
        report = updater.update(trainee.samples(count), step)
        loss = report.metrics.get("loss", math.nan)
        why = "" if report.skipped is None else f", skipped: {report.skipped.value}"
        said.append(f"step {step + 1}: {count} samples, loss {loss:.4f}{why}")
    return policy, said
