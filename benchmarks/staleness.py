"""What old samples cost each objective, and what more side samples gain (ALGORITHMS 5).

    python -m benchmarks.staleness [--stale 0 1 2 4 8] [--steps 16] [--seeds 0 1] [--picture FILE]

The tool lab's model learns one wish from a teacher that reads the hint (the frozen start). In each
step the weights of so many steps ago sample the batch, so every sample is exactly that stale; there
are no agents, engines or judges. Accuracy is how often the wish is done, unasked, on other prompts.

    reverse KL, recomputed    side samples, advantage of the current student: the method
    reverse KL, stored        the same, advantage of the student that sampled
    forward KL top-k          the teacher's likeliest tokens

The second table is the estimator's variance: one stale batch, its side samples drawn again and
again; the mean squared distance of the gradient from its mean, as a share of that of one sample.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from examples.tool_lab.cases import hinted_pair
from examples.tool_lab.evaluate import Rate, build_cases, score_cases
from examples.tool_lab.local_generate import RENDERER, LocalGenerator
from examples.tool_lab.run_lab import MODEL
from opd.report.page import pyplot
from records.types import Ids, ReadySample, Teaching, VersionSpan
from rollout_bridge.rendering.rendering import Rendering
from trainer.batch.turn_scores import score_responses
from trainer.config import LoraConfig, TrainerConfig
from trainer.model.policy import Policy, WithoutAdapters
from trainer.model.token_states import LogprobModel
from trainer.step.update import Updater

KIND = "unit"
SIDE = {"name": "side_samples", "samples": 16}
SETTINGS = {
    "reverse KL, recomputed": SIDE,
    "reverse KL, stored": {**SIDE, "advantage_reference": "old"},
    "forward KL top-k": {"name": "forward_kl_topk", "topk": 16},
}
SIZES = (1, 4, 16, 64)
_BATCH = 16
_DRAWS = 16
_STALE_BY = 4


class Adapters:
    """The adapters of a policy after each step, and the policy wearing any of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._kept = policy, [_copies(policy)]

    def keep(self) -> None:
        """As they are now."""
        self._kept.append(_copies(self._policy))

    def has(self, version: int) -> bool:
        """As `Older`."""
        return 0 <= version < len(self._kept)

    @contextmanager
    def at(self, version: int) -> Iterator[LogprobModel]:
        """As `Older`."""
        worn = _copies(self._policy)
        _wear(self._policy, self._kept[version])
        try:
            yield self._policy
        finally:
            _wear(self._policy, worn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to learn, at one staleness."""

    setting: str
    stale: int
    seed: int


def main() -> None:
    """Print both tables, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stale", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--n", type=int, default=256, help="answers measured after each run")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rendering = Rendering.load(str(MODEL), RENDERER)
    found: dict[tuple[str, int], list[float]] = {}
    print("| objective | staleness | wish done |\n|---|---|---|", flush=True)
    for setting in SETTINGS:
        for stale in given.stale:
            rates = [
                learned(Run(setting=setting, stale=stale, seed=seed), given, rendering)
                for seed in given.seeds
            ]
            found[setting, stale] = [rate.value for rate in rates]
            total = Rate(hits=sum(r.hits for r in rates), count=sum(r.count for r in rates))
            low, high = total.interval
            print(
                f"| {setting} | {stale} | {total.value:.3f} [{low:.3f}, {high:.3f}] |", flush=True
            )
    shares = variances(rendering, given.seeds[0])
    print("\n| m | variance of the gradient, of one sample's |\n|---|---|")
    for size, share in shares.items():
        print(f"| {size} | {share:.4f} |")
    if given.picture is not None:
        given.picture.write_text(picture(found, shares), encoding="utf-8")


def learned(run: Run, given: argparse.Namespace, rendering: Rendering) -> Rate:
    """How often the wish is done after the steps of one run."""
    updater = updater_of(SETTINGS[run.setting], run.seed, rate=given.rate)
    adapters = Adapters(updater.policy)
    updater.older = adapters
    rng = random.Random(run.seed)
    for step in range(given.steps):
        version = max(0, step - run.stale)
        gaps = [step - version] * _BATCH
        samples = sampled(updater.policy, adapters, version, rendering, rng)
        drawn = {one.turn_id: one for one in updater.draw_side_samples(samples, gaps)}
        samples = [drawn.get(one.turn_id, one) for one in samples]
        updater.update(samples, step, version_gaps=gaps)
        adapters.keep()
    torch.manual_seed(run.seed)
    answering = LocalGenerator(updater.policy.model, rendering)
    cases = build_cases("success", given.n, seed=10_000 + run.seed, kinds=(KIND,))
    answers = answering([case.request for case in cases], 1.0)
    return score_cases(cases, answers)[f"success_{KIND}"]


def variances(rendering: Rendering, seed: int) -> dict[int, float]:
    """m -> the variance of the gradient, as a share of that of one sample: at the same weights, on
    the same samples.
    """
    moved = updater_of(SIDE, seed, rate=1e-4)
    adapters, rng = Adapters(moved.policy), random.Random(seed)
    moved.older = adapters
    for step in range(_STALE_BY):
        fresh = sampled(moved.policy, adapters, step, rendering, rng)
        moved.update(moved.draw_side_samples(fresh), step)
        adapters.keep()
    stale = sampled(moved.policy, adapters, 0, rendering, rng)
    gaps = [_STALE_BY] * len(stale)
    found: dict[int, float] = {}
    for size in SIZES:
        config = config_of({**SIDE, "samples": size}, seed, rate=1e-4)
        updater = Updater(moved.policy, None, config, teacher=moved.teacher, older=adapters)
        gradients = []
        for number in range(_DRAWS):
            torch.manual_seed(1000 * seed + number)
            drawn = updater.draw_side_samples(stale, gaps)
            updater.accumulate(updater.preparation.prepare(drawn, gaps))
            gradients.append(_gradient(updater.policy))
        stacked = torch.stack(gradients).double()
        found[size] = float((stacked - stacked.mean(dim=0)).square().sum(dim=-1).mean())
    return {size: value / found[SIZES[0]] for size, value in found.items()}


def config_of(objective: dict[str, object], seed: int, *, rate: float) -> TrainerConfig:
    """Adapters, a frozen teacher, and nothing that corrects or holds besides the objective."""
    return TrainerConfig.model_validate(
        {
            "objective": objective,
            "teacher": {"kind": "frozen"},
            "lora": LoraConfig(rank=8),
            "learning_rate": rate,
            "adam_betas": (0.5, 0.95),
            "beta_kl": 0.0,
            "max_staleness": 64,
            "correction": {"importance_level": "none"},
            "seed": seed,
        }
    )


def updater_of(objective: dict[str, object], seed: int, *, rate: float) -> Updater:
    """A policy with new adapters, taught by its start."""
    config = config_of(objective, seed, rate=rate)
    policy = Policy.load(
        str(MODEL),
        device="cpu",
        dtype="float32",
        chunk_tokens=config.logprob_chunk_tokens,
        lora=config.lora,
        seed=seed,
    )
    return Updater(policy, None, config, teacher=WithoutAdapters(policy))


def sampled(
    policy: Policy, adapters: Adapters, version: int, rendering: Rendering, rng: random.Random
) -> list[ReadySample]:
    """A batch of answers by the weights of `version`, with the hinted prompt of each."""
    pairs = [hinted_pair(rng, KIND) for _ in range(_BATCH)]
    prompts = [rendering.prompt_ids(plain.messages, plain.tools) for plain, _ in pairs]
    hinted = [rendering.prompt_ids(other.messages, other.tools) for _, other in pairs]
    torch.manual_seed(rng.randrange(2**31))
    with adapters.at(version) as model:
        answers = LocalGenerator(policy.model, rendering).sample_ids(prompts, 1.0)
        scores = score_responses(model, prompts, answers, max_tokens=8192, device="cpu")
    return [
        _sample(f"{version}-{number}", version, prompt, answer, score.logprobs, other)
        for number, (prompt, answer, score, other) in enumerate(
            zip(prompts, answers, scores, hinted, strict=True)
        )
    ]


def _sample(
    turn_id: str, version: int, prompt: Ids, answer: Ids, logprobs: Tensor, hinted: Ids
) -> ReadySample:
    teaching = Teaching(
        candidate=0, hint=KIND, teacher="start", teacher_version="", hinted_prompt_ids=hinted
    )
    return ReadySample(
        turn_id=turn_id,
        session_id=turn_id,
        prompt_ids=prompt,
        response_ids=answer,
        rollout_logprobs=logprobs.float().numpy(),
        teacher_logprobs=np.full(len(answer), np.nan, dtype=np.float32),
        temperature=1.0,
        distribution_modified=None,
        version_spans=(VersionSpan(version=version, start=0, end=len(answer)),),
        hint=KIND,
        created_at=0.0,
        teachings=(teaching,),
    )


def _copies(policy: Policy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.trainable_parameters()]


@torch.no_grad()
def _wear(policy: Policy, adapters: Sequence[Tensor]) -> None:
    for parameter, kept in zip(policy.trainable_parameters(), adapters, strict=True):
        parameter.copy_(kept)


def _gradient(policy: Policy) -> Tensor:
    parts = [one.grad for one in policy.trainable_parameters() if one.grad is not None]
    return torch.cat([part.flatten() for part in parts])


def picture(found: dict[tuple[str, int], list[float]], shares: dict[int, float]) -> str:
    """An SVG drawing: accuracy against staleness, a dot for each seed, and variance against m."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for number, setting in enumerate(SETTINGS):
        points = {stale: rates for (name, stale), rates in found.items() if name == setting}
        means = [fmean(rates) for rates in points.values()]
        colour = f"C{number}"
        left.plot(list(points), means, color=colour, marker="o", markersize=4, label=setting)
        for stale, rates in points.items():
            left.plot([stale] * len(rates), rates, ".", color=colour, alpha=0.5, markersize=4)
    left.set_xlabel("steps that each sample is old")
    left.set_ylabel("wish done, unasked")
    left.set_ylim(-0.02, 1.02)
    left.legend(fontsize=8, frameon=False)
    right.loglog(list(shares), list(shares.values()), "o-", color="C0", markersize=4)
    right.loglog(list(shares), [1 / size for size in shares], ":", color="0.5", label="1/m")
    right.set_xlabel("m, side samples at each token")
    right.set_ylabel("variance of the gradient")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    text = io.StringIO()
    with pyplot.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


if __name__ == "__main__":
    main()
