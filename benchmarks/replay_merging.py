"""What merging turns of recorded sessions saves the trainer, and that it changes no gradient.

    python -m benchmarks.replay_merging [FILE] [--timed-sessions 1]

1. Tokens that go through the model for all turns that have a next state: merged, and as a sequence
   per turn, compared with the distinct tokens of the conversations (the nodes of each session's
   tree of ids: a prefix that turns share counts once). This is counted for the batches of a replay,
   which contain whole sessions, and for batches of the same number of turns that are cut anywhere.
   In the latter, turns of one session in different batches share nothing, because their weights
   differ.
2. On some sessions: the trainer's own loss and gradients both ways in float32, alternating; median
   seconds, and the largest difference of any gradient's element over the largest element.

Responses are the recorded ones; log-probs of rollout and teacher are random (any values will do).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.recorded_sessions import (
    SESSIONS,
    distinct_tokens,
    imported_turns,
    ready_samples,
)
from opd.replay.run_replay import DEFAULTS, LAB_MODEL
from records.types import ReadySample
from rollout_bridge.merging import PackedSequence, TurnSpan, merge_turns
from trainer.batch.collate import plan_micro_batches
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.step.update import Updater

MOST_TOKENS = 1.1
LARGEST_DIFFERENCE = 1e-5
Way = Callable[[Sequence[ReadySample]], list[PackedSequence]]


def separate_turns(samples: Sequence[ReadySample]) -> list[PackedSequence]:
    """One sequence per sample, the reference that `merge_turns` must agree with."""
    return [
        PackedSequence(
            ids=np.concatenate([one.prompt_ids, one.response_ids]),
            spans=(
                TurnSpan(
                    turn=index,
                    start=len(one.prompt_ids),
                    end=len(one.prompt_ids) + len(one.response_ids),
                ),
            ),
        )
        for index, one in enumerate(samples)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """Tokens through the model in one pass over all batches: `real` ones, and with padding."""

    real: int
    padded: int


def main() -> None:
    """Print counts and ratios; exit 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=SESSIONS)
    parser.add_argument("--model", type=Path, default=LAB_MODEL)
    parser.add_argument("--batch", type=int, default=DEFAULTS["trainer"]["rollout_batch_size"])
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--timed-sessions", type=int, default=1, help="of part 2, the first ones")
    parser.add_argument("--timed-turns", type=int, default=12, help="of part 2, most turns of each")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    samples = ready_samples(imported_turns([arguments.file], arguments.model))
    fits = counts(samples, arguments.batch, arguments.micro_batch_tokens) <= MOST_TOKENS
    some = first_sessions(samples, arguments.timed_sessions, arguments.timed_turns)
    if some:
        difference = compare(some, arguments.model, arguments.micro_batch_tokens, arguments.rounds)
        fits = fits and difference <= LARGEST_DIFFERENCE
    raise SystemExit(0 if fits else 1)


def counts(samples: Sequence[ReadySample], batch: int, max_tokens: int) -> float:
    """Print both counts for both kinds of batch; returns merged / distinct tokens of the
    conversations, including padding, in the batches of a replay.
    """
    sessions = by_session(samples)
    responses = sum(len(sample.response_ids) for sample in samples)
    print(f"{len(sessions)} sessions, {len(samples)} turns, {responses:,} policy tokens")
    ratio, whole = 0.0, distinct_of(samples)
    shared = distinct_tokens([path_ids(sample) for sample in samples])
    print(f"(what sessions share, counted once as well: {shared:,} distinct tokens)")
    for name, batches in (
        (f"whole sessions, {batch} turns or more", whole_sessions(samples, batch)),
        (
            f"batches of {batch} turns",
            [samples[at : at + batch] for at in range(0, len(samples), batch)],
        ),
    ):
        distinct = sum(distinct_of(one) for one in batches)
        merged = forwarded(batches, merge_turns, max_tokens)
        separate = forwarded(batches, separate_turns, max_tokens)
        ratio = ratio or merged.padded / whole
        print(f"{name}: {distinct:,} distinct tokens, {distinct / whole:.2f} x the conversations'")
        for way, count in (("merged", merged), ("a sequence per turn", separate)):
            print(
                f"  {way:20}{count.real:12,} tokens {count.real / distinct:7.3f} x distinct;"
                f" with padding {count.padded:12,} {count.padded / distinct:7.3f} x"
            )
        print(
            f"  a sequence per turn / merged, with padding: {separate.padded / merged.padded:.2f}"
        )
    print(f"merged / distinct of the conversations: {ratio:.3f} (at most {MOST_TOKENS})")
    return ratio


def whole_sessions(samples: Sequence[ReadySample], batch: int) -> list[list[ReadySample]]:
    """Batches of at least `batch` turns, filled up with the turns of their sessions; the last may
    be smaller.
    """
    batches: list[list[ReadySample]] = [[]]
    for session in by_session(samples).values():
        if len(batches[-1]) >= batch:
            batches.append([])
        batches[-1] += session
    return batches


def by_session(samples: Iterable[ReadySample]) -> dict[str, list[ReadySample]]:
    """Samples of each session, in order."""
    sessions: dict[str, list[ReadySample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session_id, []).append(sample)
    return sessions


def first_sessions(samples: Sequence[ReadySample], count: int, turns: int) -> list[ReadySample]:
    """At most `turns` turns of each of the first `count` sessions."""
    sessions = itertools.islice(by_session(samples).values(), count)
    return [sample for session in sessions for sample in session[:turns]]


def distinct_of(samples: Sequence[ReadySample]) -> int:
    """Nodes of the sessions' trees."""
    return sum(
        distinct_tokens([path_ids(sample) for sample in session])
        for session in by_session(samples).values()
    )


def path_ids(sample: ReadySample) -> np.ndarray:
    """A turn's prompt and response."""
    return np.concatenate([sample.prompt_ids, sample.response_ids])


def forwarded(batches: Sequence[Sequence[ReadySample]], way: Way, max_tokens: int) -> Forwarded:
    """The tokens in the trainer's micro-batches of these batches."""
    real = padded = 0
    for samples in batches:
        for group in plan_micro_batches(way(samples), max_tokens):
            lengths = [len(sequence.ids) for sequence in group]
            real += sum(lengths)
            padded += len(lengths) * max(lengths)
    return Forwarded(real=real, padded=padded)


def compare(samples: Sequence[ReadySample], model: Path, max_tokens: int, rounds: int) -> float:
    """Print the ratio of times; returns the largest relative difference of gradients."""
    config = TrainerConfig(micro_batch_tokens=max_tokens, beta_kl=0.0)
    policy = Policy.load(
        str(model), device="cpu", dtype="float32", chunk_tokens=config.logprob_chunk_tokens
    )
    policy.shares_prefixes = False  # merging alone is measured; the rest: benchmarks.shared_prefix
    updater = Updater(policy, None, config)
    ways: dict[str, Way] = {"merged": merge_turns, "a sequence per turn": separate_turns}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            updater.accumulate(updater.preparation.prepare(samples, sequences=way(samples)))
            seconds[name].append(time.perf_counter() - begun)
            gradients[name] = gradients_of(policy)
    merged, separate = (statistics.median(seconds[name]) for name in ways)
    print(f"loss and gradients of {len(by_session(samples))} sessions, {len(samples)} turns:")
    print(
        f"  merged {merged:.2f} s, a sequence per turn {separate:.2f} s: {separate / merged:.1f} x"
    )
    difference = largest_difference(*gradients.values())
    print(f"largest relative difference: {difference:.1e} (at most {LARGEST_DIFFERENCE:.0e})")
    return difference


def gradients_of(policy: Policy) -> list[Tensor]:
    """Copies of all gradients."""
    gradients = [parameter.grad for parameter in policy.trainable_parameters()]
    return [gradient.detach().clone() for gradient in gradients if gradient is not None]


def largest_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest |a - b| of any element over the largest |b|, all parameters together."""
    difference = max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
    return difference / max(float(y.abs().max()) for y in b)


if __name__ == "__main__":
    main()
