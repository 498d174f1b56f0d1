"""How far the policy is from its hinted teacher, on held-out names: distillation should close this
gap.

The policy answers a prompt; at every token of that answer its distribution is compared with that of
the frozen start under the same prompt plus the hint. Exact KL over the whole vocabulary, both
ways, averaged over tokens. Runs in this process, from folders of weights.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from examples.tool_lab.cases import hinted_pair
from examples.tool_lab.local_generate import LocalGenerator
from opd.evaluation.gap import HintedCase, gap_of
from opd.evaluation.gap import measure_gap as teacher_gap
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.publishing.merged import MergedFolders

PAIRS = 96


def measure_gap(
    student: str, teacher: str, kinds: Sequence[str], seed: int, pairs: int = PAIRS
) -> dict[str, float]:
    """{"reverse_kl", "forward_kl"} in nats per token, `pairs` prompts for each of `kinds`.

    `student` and `teacher` are folders of weights; equal seeds give equal prompts and hints.
    """
    rng = random.Random(f"gap-{seed}")
    cases = [hinted_pair(rng, kind) for kind in kinds for _ in range(pairs)]
    generator = LocalGenerator.load(student)
    rendering = generator.rendering
    plain = [rendering.prompt_ids(case.messages, case.tools) for case, _ in cases]
    hinted = [rendering.prompt_ids(case.messages, case.tools) for _, case in cases]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        responses = generator.sample_ids(plain, temperature=1.0)
    asked = [
        HintedCase(
            session=str(number),
            prompt_ids=prompt,
            hinted_prompt_ids=with_hint,
            response_ids=response,
        )
        for number, (prompt, with_hint, response) in enumerate(
            zip(plain, hinted, responses, strict=True)
        )
    ]
    found = gap_of(teacher_gap(student, teacher, asked))
    return {"reverse_kl": found.reverse_kl, "forward_kl": found.forward_kl}


@contextmanager
def weights_of(folder: Path, version: int, start: str) -> Iterator[str]:
    """A temporary folder with all weights of a run's version; `start` is version 0."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(folder / "checkpoints", start, seed=0)
        path = MergedFolders(Path(scratch), checkpoints).path(version)
        assert path is not None, "the newest weights are kept"
        yield path
