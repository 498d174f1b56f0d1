"""Memory and time of the token-level OPD loss: linear_logprobs against log_softmax + gather.

    python -m benchmarks.logprob_memory [--tokens 4096] [--vocab 151936] [--hidden 1024]

Forward and backward of the loss from hidden states and an output matrix that both need gradients.
Memory is the peak above the resident inputs, including gradients: of a child process for each path
(the resident set's high-water mark), or of the allocator with --device cuda. Then the two paths
alternate in this process, --pairs times, and the gradients of the last pair are compared. CPU time
is printed too, because it depends less on what else runs. Most of the gradients' difference is the
rounding of log_softmax, whose float32 sum over a large vocabulary is the less exact one. The
defaults need 12 GB and, on two idle CPU cores, about ten minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.objectives.batch import token_weights, weighted_sum
from trainer.objectives.distributions.kl import distillation_advantage
from trainer.objectives.linear.logprobs import CHUNK_TOKENS, CHUNK_VOCAB, linear_logprobs
from trainer.objectives.policy.ppo import ppo_clip

PATHS = ("plain", "linear")
MAX_MEMORY_RATIO, MAX_TIME_RATIO, MAX_GRADIENT_DIFFERENCE = 0.20, 1.4, 1e-5
MIB = 2**20


@dataclass(slots=True)
class Inputs:
    """What is resident before a run: hidden states, output matrix, ids, the teacher's log-probs."""

    hidden_NH: Tensor
    weight_VH: Tensor
    ids_N: Tensor
    teacher_N: Tensor

    @classmethod
    def make(cls, tokens: int, vocab: int, hidden: int, device: str) -> Inputs:
        """Random inputs whose logits have a standard deviation of 3; uses no temporary memory."""
        torch.manual_seed(0)
        weight_VH = torch.empty(vocab, hidden, device=device).normal_(std=3 / hidden**0.5)
        return cls(
            hidden_NH=torch.empty(tokens, hidden, device=device).normal_().requires_grad_(),
            weight_VH=weight_VH.requires_grad_(),
            ids_N=torch.randint(vocab, (tokens,), device=device),
            teacher_N=torch.empty(tokens, device=device).uniform_(-20.0, 0.0),
        )

    def take_gradients(self) -> tuple[Tensor, Tensor]:
        """Those of (hidden states, output matrix); they are cleared for the next run."""
        hidden_NH, self.hidden_NH.grad = self.hidden_NH.grad, None
        weight_VH, self.weight_VH.grad = self.weight_VH.grad, None
        assert hidden_NH is not None
        assert weight_VH is not None
        return hidden_NH, weight_VH


def run_once(path: str, inputs: Inputs, options: argparse.Namespace) -> tuple[float, float]:
    """Forward and backward of the loss; seconds, and CPU seconds of all threads."""
    started, started_cpu = time.perf_counter(), time.process_time()
    if path == "plain":
        logits_NV = torch.nn.functional.linear(inputs.hidden_NH, inputs.weight_VH)
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        # Otherwise it would be kept to the end, which autograd does not need.
        del logits_NV
        logprobs_N = logprobs_NV.gather(1, inputs.ids_N.unsqueeze(1)).squeeze(1)
        del logprobs_NV
    else:
        logprobs_N = linear_logprobs(
            inputs.hidden_NH,
            inputs.weight_VH,
            inputs.ids_N,
            chunk_tokens=options.chunk_tokens,
            chunk_vocab=options.chunk_vocab,
        ).logprobs
    opd_loss(logprobs_N, inputs.teacher_N).backward()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - started_cpu


def opd_loss(logprobs_N: Tensor, teacher_N: Tensor) -> Tensor:
    """The on-policy loss: the old log-probs are the current ones."""
    old_N = logprobs_N.detach()
    advantages_N = distillation_advantage(teacher_N, old_N)
    terms = ppo_clip(logprobs_N, old_N, advantages_N, clip_low=0.2, clip_high=0.28)
    weights_1N = token_weights(torch.ones_like(old_N).unsqueeze(0), "token-mean")
    return weighted_sum(terms.loss.unsqueeze(0), weights_1N)


def peak_bytes(path: str, options: argparse.Namespace) -> int:
    """Peak of one run above the inputs, in this process."""
    # The first run makes libraries load code and start threads.
    run_once(path, Inputs.make(8, 64, 16, options.device), options)
    inputs = Inputs.make(options.tokens, options.vocab, options.hidden, options.device)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_once(path, inputs, options)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident_bytes("VmRSS")
    run_once(path, inputs, options)
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def child_peak_bytes(path: str) -> int:
    """`peak_bytes` in a process of its own, with the options of this one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare_times(options: argparse.Namespace) -> tuple[list[float], list[float], list[float]]:
    """(time ratio of each pair, CPU time ratio of each pair, gradient differences).

    A gradient difference is the largest one divided by the largest entry, for the last pair.
    """
    inputs = Inputs.make(options.tokens, options.vocab, options.hidden, options.device)
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    for number in range(options.pairs):
        gradients.clear()
        seconds: dict[str, tuple[float, float]] = {}
        # The order alternates, so that neither path always follows the other.
        for path in PATHS if number % 2 == 0 else reversed(PATHS):
            seconds[path] = run_once(path, inputs, options)
            gradients[path] = inputs.take_gradients()
        ratios.append(seconds["linear"][0] / seconds["plain"][0])
        cpu_ratios.append(seconds["linear"][1] / seconds["plain"][1])
        texts = [f"{path} {wall:.2f} s (CPU {cpu:.2f} s)" for path, (wall, cpu) in seconds.items()]
        print(
            f"pair {number + 1}: {', '.join(texts)}, "
            f"ratio {ratios[-1]:.3f} (CPU {cpu_ratios[-1]:.3f})",
            flush=True,
        )
    differences = [
        float(torch.dist(plain, linear, p=float("inf")) / plain.abs().max())
        for plain, linear in zip(gradients["plain"], gradients["linear"], strict=True)
    ]
    return ratios, cpu_ratios, differences


def verdict(value: float, limit: float) -> str:
    """Whether a value stays within its limit."""
    return f"(limit {limit:g}: {'kept' if value <= limit else 'MISSED'})"


def main() -> None:
    """Measure memory first: the parent is still small, so both children have the machine."""
    options = parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak_of is not None:
        print(peak_bytes(options.peak_of, options))
        return
    print(f"N {options.tokens}, V {options.vocab}, H {options.hidden}, float32, {options.device}")
    peaks = {path: child_peak_bytes(path) for path in PATHS}
    ratio = peaks["linear"] / peaks["plain"]
    print(
        f"peak above inputs: plain {peaks['plain'] / MIB:.0f} MiB, linear "
        f"{peaks['linear'] / MIB:.0f} MiB (gradients of both inputs included)",
        flush=True,
    )
    print(f"memory ratio {ratio:.3f} {verdict(ratio, MAX_MEMORY_RATIO)}", flush=True)
    ratios, cpu_ratios, differences = compare_times(options)
    ratio = statistics.median(ratios)
    print(
        f"time ratio {ratio:.3f}, median of {options.pairs} interleaved pairs "
        f"{verdict(ratio, MAX_TIME_RATIO)}; of CPU time {statistics.median(cpu_ratios):.3f}"
    )
    print(
        f"largest gradient difference, relative to the largest entry: hidden {differences[0]:.1e}, "
        f"weight {differences[1]:.1e} {verdict(max(differences), MAX_GRADIENT_DIFFERENCE)}"
    )


def parse_options() -> argparse.Namespace:
    """Sizes, and where to run."""
    parser = argparse.ArgumentParser(description="linear_logprobs against log_softmax + gather")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--chunk-vocab", type=int, default=CHUNK_VOCAB)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch chooses")
    parser.add_argument("--peak-of", choices=PATHS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
