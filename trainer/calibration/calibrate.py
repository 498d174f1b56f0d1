"""Do the engines compute what the trainer computes, and the same each time? Log-probs of fixed
sequences, at equal weights.

Every later figure rests on this: advantages are differences between an engine's log-probs and the
trainer's. A gap above the bound is refused; the noise that remains is the floor below which a batch
teaches nothing (ALGORITHMS 1.10). It knows no store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from records.types import Ids, Logprobs
from rollout_bridge.embedded.model.threads import in_thread
from rollout_bridge.engine.types import Generation, SamplingParams
from trainer.errors import CalibrationError
from trainer.model.token_states import LogprobModel

NUM_SAMPLED = 8
"""Tokens that an engine samples after each sequence."""
USUAL_GAP = 0.05
"""Nats per token between teacher and student in a batch that teaches: 0.03 to 0.3 in the lab."""


class Scorer(Protocol):
    """The part of the engine client that calibration uses."""

    async def score(self, input_ids: Ids, start: int) -> Logprobs:
        """Log-probs at temperature 1 of `input_ids[start:]`."""
        ...

    async def generate(self, input_ids: Ids, params: SamplingParams) -> Generation:
        """Sample a continuation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNoise:
    """|engine - trainer| over all tokens of the sequences, in nats; `spread` is how much a token's
    log-prob differs when it is scored again, alone and with others: mean and largest. `sampled_max`
    is the largest gap of tokens that the engine sampled itself.
    """

    mean_abs: float
    max_abs: float
    spread_mean: float
    spread_max: float
    sampled_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result by engine."""

    engines: dict[str, EngineNoise]
    bound: float
    num_sequences: int
    num_tokens: int

    @property
    def noise(self) -> float:
        """Mean |log-prob difference| at equal weights, from the trainer or from one score to the
        next, of the noisiest engine.
        """
        return max(max(one.mean_abs, one.spread_mean) for one in self.engines.values())

    @property
    def warnings(self) -> list[str]:
        """A line for each engine whose scores differ by more than a tenth of a usual gap."""
        return [
            f"engine {name}: the same tokens scored again differ by {one.spread_mean:.1e} nats "
            f"(at most {one.spread_max:.1e}), more than a tenth of a usual gap ({USUAL_GAP}): "
            "lessons smaller than ten times that are dropped as noise; serve it in float32, or "
            "with deterministic kernels"
            for name, one in self.engines.items()
            if one.spread_mean > USUAL_GAP / 10
        ]

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        content = {"noise": self.noise, "warnings": self.warnings, **asdict(self)}
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)


async def calibrate(
    engines: Mapping[str, tuple[Scorer, Callable[[Ids], Logprobs]]],
    sequences: Sequence[Ids],
    *,
    bound: float,
    thread: Executor,
) -> Calibration:
    """Score `sequences` (each at least 2 ids) with every engine, together, one by one and together
    again, and with the trainer's own forward pass. Also compare the log-probs of tokens that each
    engine samples.

    Each engine comes with the function that gives the trainer's log-probs [T-1] of ids[1:] at the
    weights that this engine serves; it is called in `thread`. Raises CalibrationError for a gap
    above `bound` or a log-prob that is not finite; it names the engine, the gap and the place.
    """
    if not engines or not sequences:
        raise ValueError("calibration needs an engine and a sequence")
    results = {}
    for name, (scorer, own) in engines.items():
        expected = await in_thread(thread, lambda own=own: [own(ids) for ids in sequences])
        rounds = [
            await asyncio.gather(*(scorer.score(ids, 1) for ids in sequences)),
            [await scorer.score(ids, 1) for ids in sequences],
            await asyncio.gather(*(scorer.score(ids, 1) for ids in reversed(sequences))),
        ]
        rounds[-1].reverse()
        gaps = np.stack([_gaps(name, scored, expected, bound) for scored in rounds])
        spread = np.ptp([np.concatenate(scored) for scored in rounds], axis=0)
        results[name] = EngineNoise(
            mean_abs=float(gaps.mean()),
            max_abs=float(gaps.max()),
            spread_mean=float(spread.mean()),
            spread_max=float(spread.max()),
            sampled_max=float(
                (await _sampled_gaps(name, scorer, own, sequences, bound, thread)).max()
            ),
        )
    return Calibration(
        engines=results,
        bound=bound,
        num_sequences=len(sequences),
        num_tokens=sum(len(ids) - 1 for ids in sequences),
    )


def own_logprobs(model: LogprobModel, device: torch.device) -> Callable[[Ids], Logprobs]:
    """The trainer's log-probs [T-1] of ids[1:] under `model`."""

    @torch.no_grad()
    def score(ids: Ids) -> Logprobs:
        ids_BT = torch.from_numpy(np.asarray(ids, dtype=np.int64)).unsqueeze(0).to(device)
        mask_BT = torch.ones(ids_BT.shape, device=device)
        mask_BT[:, 0] = 0.0
        return model.token_logprobs(ids_BT, mask_BT).logprobs_BT[0, 1:].cpu().numpy()

    return score


async def _sampled_gaps(
    name: str,
    engine: Scorer,
    own: Callable[[Ids], Logprobs],
    sequences: Sequence[Ids],
    bound: float,
    thread: Executor,
) -> np.ndarray:
    """Gaps of the log-probs that come with sampled tokens: the ones that training compares with."""
    # Prompt and answer are no longer than what was scored.
    prompts = [ids[: max(len(ids) - NUM_SAMPLED, 1)] for ids in sequences]
    new = [max(len(ids) - len(prompt), 1) for ids, prompt in zip(sequences, prompts, strict=True)]
    answers = await asyncio.gather(
        *(
            engine.generate(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
            for prompt, count in zip(prompts, new, strict=True)
        )
    )

    def expected() -> list[Logprobs]:
        return [
            own(np.concatenate([prompt, answer.output_ids]))[len(prompt) - 1 :]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    reported = [answer.output_logprobs for answer in answers]
    where = "what it sampled after sequence"
    return _gaps(name, reported, await in_thread(thread, expected), bound, where)


def _gaps(
    name: str,
    scored: Sequence[Logprobs],
    expected: Sequence[Logprobs],
    bound: float,
    where: str = "sequence",
) -> np.ndarray:
    gaps = []
    for index, (engine, own) in enumerate(zip(scored, expected, strict=True)):
        if engine.shape != own.shape:
            raise CalibrationError(
                f"engine {name}: {engine.size} log-probs for {own.size} tokens of {where} {index}"
            )
        gap = np.abs(engine.astype(np.float64) - own)
        if not np.isfinite(gap).all():
            raise CalibrationError(f"engine {name}: a log-prob of {where} {index} is not finite")
        worst = int(gap.argmax())
        if gap[worst] > bound:
            raise CalibrationError(
                f"engine {name} differs from the trainer by {gap[worst]:.2e} at token {worst + 1} "
                f"of {where} {index} ({engine[worst]:.5f} against {own[worst]:.5f}); the bound is "
                f"{bound:.0e}. Other weights, another precision, or another tokenizer?"
            )
        gaps.append(gap)
    return np.concatenate(gaps)
