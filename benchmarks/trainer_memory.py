"""Memory of the trainer once loaded, in a step, and while it writes a checkpoint.

    python -m benchmarks.trainer_memory --model runs/models/smollm2-135m-instruct
        [--contexts 512 2048] [--weights lora full] [--set trainer.micro_batch_tokens=4096 ...]

Each line is a trainer of its own, in a child process, with the recipe of `opd serve` and its number
of samples per step, all of the given length. Its share of memory (PSS: its private pages, and its
part of shared ones) is sampled while it works; the largest resident set (VmHWM) is the kernel's own
figure, which counts shared pages in full. MiB.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opd.run.config import merge, parse_overrides
from opd.run.recipe import TOP_K, recipe
from records.types import ReadySample, Teaching, VersionSpan
from trainer.config import TrainerConfig
from trainer.model.heap import give_back, heap_environment
from trainer.model.model_config import config_value, model_vocab_size

RESPONSE_TOKENS = 128
SAMPLE_EVERY_S = 0.02
PHASES = ("loaded", "step", "checkpoint", "rest")


def trainer_config(options: argparse.Namespace, weights: str) -> TrainerConfig:
    """The recipe for the model, with the given settings on top."""
    width = config_value(options.model, "hidden_size")
    values = recipe(width, full_weights=weights == "full")["trainer"]
    given = parse_overrides(options.set).get("trainer", {})
    return TrainerConfig.model_validate(merge({**values, "tensorboard": False}, given))


def work(options: argparse.Namespace) -> None:
    """The child's work: prints each phase on a line when it begins."""
    from trainer.checkpoints.checkpoint import Checkpoints
    from trainer.checkpoints.restore import restore

    config = trainer_config(options, options.child)
    # Models are touched on one thread, not the main one, which has a heap of its own.
    with ThreadPoolExecutor(1) as thread, tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), options.model, 0)
        root = checkpoints.open()[-1]
        updater = thread.submit(restore, config, checkpoints, root).result()
        say("loaded")
        time.sleep(10 * SAMPLE_EVERY_S)
        vocab = model_vocab_size(options.model)
        seconds = []
        for step in range(options.steps):
            batch = samples(config.rollout_batch_size, options.contexts[0], vocab, seed=step)
            say("step")
            begun = time.perf_counter()
            report = thread.submit(updater.update, batch, step).result()
            seconds.append(time.perf_counter() - begun)
            assert report.skipped is None, report.skipped
            give_back()
            say("checkpoint")
            parent = thread.submit(
                checkpoints.write,
                updater.policy,
                updater.optimizer,
                parent=root,
                version=step + 1,
                turn_ids=[one.turn_id for one in batch],
                staleness=[0] * len(batch),
            ).result()
            checkpoints.prune({parent.version})
            give_back()
            say("rest")
            time.sleep(10 * SAMPLE_EVERY_S)
    say(f"seconds {min(seconds):.1f}")


def say(what: str) -> None:
    """Tell the parent."""
    print(what, flush=True)


def samples(count: int, context: int, vocab: int, seed: int) -> list[ReadySample]:
    """Turns of `context` tokens with a teacher's scores, as scoring leaves them."""
    generator = np.random.default_rng(seed)
    length = min(RESPONSE_TOKENS, context // 2)
    return [_sample(generator, f"{seed}-{one}", context, length, vocab) for one in range(count)]


def _sample(
    generator: np.random.Generator, name: str, context: int, length: int, vocab: int
) -> ReadySample:
    ids = generator.integers(0, vocab, context).astype(np.int32)
    top_ids = np.argsort(generator.random((length, 4 * TOP_K)), axis=1)[:, :TOP_K]
    top = np.sort(generator.normal(-4, 0.5, (length, TOP_K)), axis=1)[:, ::-1]
    teacher = generator.normal(-3, 1, length).astype(np.float32)
    return ReadySample(
        turn_id=name,
        session_id=name,
        prompt_ids=ids[:-length],
        response_ids=ids[-length:],
        rollout_logprobs=generator.normal(-3, 1, length).astype(np.float32),
        teacher_logprobs=teacher,
        temperature=1.0,
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=length),),
        hint="a hint",
        created_at=0.0,
        teachings=(
            Teaching(
                candidate=0,
                hint="a hint",
                teacher="teacher",
                teacher_version="0",
                hinted_prompt_ids=ids[:-length],
                teacher_logprobs=teacher,
                topk_ids=top_ids.astype(np.int32),
                topk_logprobs=np.ascontiguousarray(top, dtype=np.float32),
            ),
        ),
    )


def line(options: argparse.Namespace, weights: str, context: int) -> str:
    """One line of the table."""
    try:
        found = measure(options, weights, context)
    except subprocess.CalledProcessError as error:
        return f"{weights:5} {context:7}  failed: {error.returncode}"
    figures = "".join(f"{found.peaks[phase]:11}" for phase in PHASES)
    largest = f"{max(found.peaks.values()):9} {found.largest:7}"
    return f"{weights:5} {context:7} {figures} {largest} {found.seconds:>9}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """MiB: the largest share by phase (for `rest` the last one), and the largest resident set;
    seconds of the fastest step.
    """

    peaks: dict[str, int]
    largest: int
    seconds: float


def measure(options: argparse.Namespace, weights: str, context: int) -> Measured:
    """A trainer in a child process. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "benchmarks.trainer_memory", "--model", options.model]
    command += ["--child", weights, "--contexts", str(context), "--steps", str(options.steps)]
    for one in options.set:
        command += ["--set", one]
    peaks: dict[str, int] = defaultdict(int)
    largest, phase = 0, "start"
    environment = {**os.environ, **heap_environment(os.environ)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(_each(child.stdout, lines)))
        reader.start()
        while child.poll() is None:
            found = share(child.pid)
            phase = next((one for one in reversed(lines) if one in PHASES), "start")
            if found is not None:
                peaks[phase] = max(peaks[phase], found[0]) if phase != "rest" else found[0]
                largest = found[1]
            time.sleep(SAMPLE_EVERY_S)
        reader.join()
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, command)
    seconds = next(float(one.split()[1]) for one in lines if one.startswith("seconds"))
    return Measured(peaks=dict(peaks), largest=largest, seconds=seconds)


def _each(stream, lines: list[str]) -> list[str]:
    for line in stream:
        lines.append(line.strip())
    return []


def share(pid: int) -> tuple[int, int] | None:
    """(PSS, VmHWM) of a process in MiB; None once it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = [re.search(r"^Pss:\s+(\d+)", rollup, re.M), re.search(r"VmHWM:\s+(\d+)", status)]
    if None in found:
        return None
    pss, peak = (int(one[1]) // 1024 for one in found if one is not None)
    return pss, peak


def main() -> None:
    """Print a table, line by line as it is measured."""
    options = parse_options()
    if options.child:
        work(options)
        return
    for one in options.set:
        print(one)
    heads = "".join(f"{one:>11}" for one in PHASES)
    print(f"{'':5} {'context':>7} {heads} {'peak PSS':>9} {'VmHWM':>7} {'s a step':>9}")
    for weights in options.weights:
        for context in options.contexts:
            print(line(options, weights, context), flush=True)


def parse_options() -> argparse.Namespace:
    """The model, contexts and weights; settings in the form of `opd serve --set`."""
    parser = argparse.ArgumentParser(description="memory of a trainer's step")
    parser.add_argument("--model", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--weights", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="trainer.KEY=VALUE")
    parser.add_argument("--child", choices=("lora", "full"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
