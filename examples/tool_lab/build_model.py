"""Builds the lab's model from scratch: corpus, tokenizer, training, and the files that the
repository ships.

`python -m examples.tool_lab.build_model --out DIR --seed 0` reproduces the shipped files (about 150
minutes on one core). Weights are saved in float16 to keep the repository small; they are loaded as
float32.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from renderers import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tool_lab.corpus import Mix, rows
from examples.tool_lab.tokenizer import texts_for_tokenizer, train_tokenizer
from examples.tool_lab.training import TrainingPlan, encode_rows, model_config, token_id, train

TOKENIZER_ROWS = 6000


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model (float16), tokenizer, template and generation defaults into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    stop_ids = [token_id(tokenizer, token) for token in ("<|im_end|>", "<|endoftext|>")]
    half = Qwen3ForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        eos_token_id=stop_ids, pad_token_id=stop_ids[1], do_sample=True, temperature=1.0
    )
    half.half().save_pretrained(out)
    for key in ("is_local", "local_files_only"):
        # How a tokenizer was loaded is not part of it.
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(out)


def renderer_of(tokenizer: Any) -> Qwen3Renderer:
    """The renderer under which the model is trained and served: Qwen3's, thinking disabled."""
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the training: how many rows of which mix, and the optimiser's plan on them."""

    num_rows: int
    mix: Mix
    plan: TrainingPlan


MAIN = Phase(
    num_rows=44_000,
    mix=Mix(agent=0.22, hinted=0.30, judge=0.40, copy=0.08, hinted_weight=2.0),
    plan=TrainingPlan(
        steps=1500,
        peak_learning_rate=1.5e-3,
        rows_per_step=(("agent", 10), ("judge", 7), ("copy", 2)),
    ),
)
# Votes need the longest training: transcripts are long, and what a hint asks for must be read from
# one word in them.
POLISH = Phase(
    num_rows=33_000,
    mix=Mix(agent=0.28, hinted=0.24, judge=0.44, copy=0.04, hinted_weight=2.0),
    plan=TrainingPlan(
        steps=1100,
        peak_learning_rate=1.2e-3,
        rows_per_step=(("agent", 9), ("judge", 9), ("copy", 1)),
    ),
)
# So far users want the alternative three times as often as the default, and no assistant in the
# transcripts ignores what a user has just said. A policy that has learned what most users want does
# ignore it. Without this phase the judge answers objections to that with the other users' hint.
HEEDLESS = Phase(
    num_rows=27_000,
    mix=Mix(agent=0.24, hinted=0.22, judge=0.50, copy=0.04, hinted_weight=2.0, heedless=0.6),
    plan=TrainingPlan(
        steps=1000,
        peak_learning_rate=8e-4,
        rows_per_step=(("agent", 8), ("judge", 10), ("copy", 1)),
    ),
)
# Questions to the judge about hints. It is small: each question has its own rows in every step.
QUESTIONS = Phase(
    num_rows=30_000,
    mix=Mix(
        agent=0.15,
        hinted=0.13,
        judge=0.24,
        copy=0.03,
        hinted_weight=2.0,
        heedless=0.6,
        questions=(
            ("relation", 0.08),
            ("rule", 0.06),
            ("applies", 0.12),
            ("followed", 0.12),
            ("opposite", 0.04),
            ("outside", 0.03),
        ),
    ),
    plan=TrainingPlan(
        steps=1200,
        peak_learning_rate=1e-3,
        rows_per_step=(
            ("agent", 6),
            ("judge", 5),
            ("relation", 4),
            ("rule", 2),
            ("applies", 4),
            ("followed", 4),
            ("opposite", 1),
            ("outside", 1),
            ("copy", 1),
        ),
    ),
)
# The same again at a lower rate, because users' words are now compared with hints and a rule needs
# their words; at the rate of the phase before, the policy forgot some of its open wishes.
WORDS = Phase(
    num_rows=24_000,
    mix=replace(QUESTIONS.mix, agent=0.22, hinted=0.20),
    plan=TrainingPlan(
        steps=500,
        peak_learning_rate=5e-4,
        rows_per_step=(
            ("agent", 11),
            ("judge", 7),
            ("relation", 3),
            ("rule", 3),
            ("applies", 2),
            ("followed", 2),
            ("opposite", 1),
            ("outside", 1),
            ("copy", 1),
        ),
    ),
)
# Copying appears suddenly after about 700 steps; only then are hints and transcripts learned.
# The first phase ends while its learning rate is still high; the others decay theirs to the end.
PHASES = (
    Phase(num_rows=30_000, mix=Mix(), plan=TrainingPlan(steps=2800, stop_after=1500)),
    MAIN,
    MAIN,
    POLISH,
    HEEDLESS,
    QUESTIONS,
    WORDS,
)


def build(out: Path, seed: int, first_phase: int, start: Path | None, save_every: int) -> None:
    """Build the tokenizer and train phase by phase; prints the time left every 25 steps.

    With `start`, a folder that an earlier build saved, it continues with that model and tokenizer.
    """
    torch.manual_seed(seed)
    if start is None:
        print(f"tokenizer from {TOKENIZER_ROWS} rows", flush=True)
        tokenizer = train_tokenizer(texts_for_tokenizer(rows(seed, TOKENIZER_ROWS)))
        model = Qwen3ForCausalLM(model_config(tokenizer))
    else:
        tokenizer = AutoTokenizer.from_pretrained(start)
        model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for number in range(first_phase, len(PHASES)):
        train_phase(model, tokenizer, PHASES[number], seed + number + 1, out, save_every)
    save(model, tokenizer, out)


def train_phase(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    seed: int,
    out: Path,
    save_every: int,
) -> None:
    """Make the phase's rows and train on them."""
    source = rows(seed, phase.num_rows, phase.mix)
    data = encode_rows(
        renderer_of(tokenizer), source, progress("rows", phase.num_rows, time.monotonic())
    )
    for family, family_data in sorted(data.items()):
        mean = sum(len(row.ids) for row in family_data.rows) / len(family_data.rows)
        prefix = len(family_data.prefix)
        print(f"{family}: {len(family_data.rows)} rows, prefix {prefix}, mean {mean:.0f}")
    total = phase.plan.stop_after or phase.plan.steps
    smooth: dict[str, float] = {}

    def report(step: int, losses: dict[str, float], seconds: float) -> None:
        for family, loss in losses.items():
            smooth[family] = 0.95 * smooth.get(family, loss) + 0.05 * loss
        done = step + 1
        if done % 25 == 0 or done == total:
            left = seconds / done * (total - done)
            shown = "  ".join(f"{family} {loss:.3f}" for family, loss in smooth.items())
            times = f"{seconds:.0f} s, {left:.0f} s left in this phase"
            print(f"step {done}/{total}  {shown}  {times}", flush=True)
        if save_every and done % save_every == 0:
            save(model, tokenizer, out)

    train(model, data, phase.plan, seed, report)


def progress(what: str, total: int, started: float):
    """A callback that prints how many of `total` are done and the time left, at most every 10 s."""
    last = started

    def show(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last > 10:
            last = now
            left = (now - started) / done * (total - done)
            print(f"{what} {done}/{total}, {left:.0f} s left", flush=True)

    return show


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=0, help="also save every N steps")
    parser.add_argument("--start", type=Path, help="continue from this folder's model")
    parser.add_argument("--phase", type=int, default=0, help="the first phase to train (0 is all)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    build(arguments.out, arguments.seed, arguments.phase, arguments.start, arguments.save_every)


if __name__ == "__main__":
    main()
