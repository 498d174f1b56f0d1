"""Builds the lab's model from nothing: corpus, tokenizer, training, and the files that the
repository ships.

`python -m examples.tool_lab.build_model --out DIR --seed 0` reproduces the shipped files (20 to 40
minutes on two cores). Weights are saved in float16 to keep the repository small; they are loaded as
float32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from renderers import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tool_lab.corpus import rows
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
    tokenizer.save_pretrained(out)


def renderer_of(tokenizer: Any) -> Qwen3Renderer:
    """The renderer under which the model is trained and served: Qwen3's, thinking disabled."""
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))


def build(out: Path, seed: int, plan: TrainingPlan, num_rows: int, save_every: int) -> None:
    """Make the corpus and the tokenizer, train, and save; a progress line with the time left about
    every 10 s.
    """
    torch.manual_seed(seed)
    print(f"tokenizer from {TOKENIZER_ROWS} rows", flush=True)
    tokenizer = train_tokenizer(texts_for_tokenizer(rows(seed, TOKENIZER_ROWS)))
    renderer = renderer_of(tokenizer)
    data = encode_rows(
        renderer, rows(seed + 1, num_rows), progress("rows", num_rows, time.monotonic())
    )
    for family, family_data in sorted(data.items()):
        mean = sum(len(row.ids) for row in family_data.rows) / len(family_data.rows)
        prefix = len(family_data.prefix)
        print(f"{family}: {len(family_data.rows)} rows, prefix {prefix}, mean {mean:.0f}")
    model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    smooth: dict[str, float] = {}

    def report(step: int, losses: dict[str, float], seconds: float) -> None:
        for family, loss in losses.items():
            smooth[family] = 0.95 * smooth.get(family, loss) + 0.05 * loss
        done = step + 1
        if done % 25 == 0 or done == plan.steps:
            left = seconds / done * (plan.steps - done)
            shown = "  ".join(f"{family} {loss:.3f}" for family, loss in smooth.items())
            print(
                f"step {done}/{plan.steps}  {shown}  {seconds:.0f} s, {left:.0f} s left", flush=True
            )
        if save_every and done % save_every == 0:
            save(model, tokenizer, out)

    train(model, data, plan, seed, report)
    save(model, tokenizer, out)


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
    parser.add_argument("--steps", type=int, default=TrainingPlan().steps)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=0, help="also save each N steps")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = TrainingPlan(steps=arguments.steps)
    build(arguments.out, arguments.seed, plan, arguments.rows, arguments.save_every)


if __name__ == "__main__":
    main()
