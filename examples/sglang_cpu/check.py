"""The check of this project on real SGLang: first the contract, then learning.

It uses two servers, one for the policy and one for judge and teacher, like a run on GPUs. The
contract suite tests the first one; then the tool lab trains through both, with the policy's weights
loaded from disk after each step.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.sglang_cpu.server import ROOT, sglang_servers
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.run_lab import run

TOKEN_LEVEL = ROOT / "examples" / "tool_lab" / "token_level.toml"
NOISE = 0.3
"""Relative size of the change that makes the contract's other weights, clearly another model."""


def check_everything(model: Path, folder: Path, *, updates: int, eval_samples: int) -> bool:
    """Run both in `folder` and print the results; returns whether all is well."""
    console = Console()
    folder.mkdir(parents=True)
    console.print("starting two SGLang servers on this CPU (a minute or two)")
    with sglang_servers(model, folder, "policy", "frozen") as (policy, frozen):
        console.print(f"policy: {policy.url}, judge and teacher: {frozen.url}")
        if not _contract(policy.url, model, other_weights(model, folder / "other_weights")):
            console.print("[red]the engine contract does not hold on SGLang[/]")
            return False
        # SGLang is asked for scores of the sampled tokens only; batches are small, because it
        # generates slowly here.
        lab = LabConfig(
            updates=updates, eval_samples=eval_samples, rehearsal=False, max_seconds=900
        )
        overrides = [f"policy.url={policy.url}", f"frozen.url={frozen.url}"]
        overrides += ["trainer.rollout_batch_size=16", "trainer.epochs_per_batch=1"]
        summary = run(lab, folder / "lab", TOKEN_LEVEL, overrides)
    problems = shortcomings(summary, updates)
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    console.print(
        f"success {summary['success_before']:.3f} -> {summary['success_after']:.3f} in "
        f"{summary['updates']} updates on SGLang, served version {summary['policy_version']}"
    )
    return not problems


def other_weights(model: Path, folder: Path) -> Path:
    """The model with changed weights, for the contract's weight updates."""
    disable_progress_bar()
    torch.manual_seed(0)
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * NOISE)
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def shortcomings(summary: dict[str, Any], updates: int) -> list[str]:
    """What a lab run on SGLang should have shown but did not; empty if all is well."""
    problems = []
    before, after = summary["success_before"], summary["success_after"]
    if after <= before:
        problems.append(f"success did not rise: {before:.3f} before, {after:.3f} after")
    if summary["updates"] < updates:
        problems.append(f"{summary['updates']} of {updates} updates were made")
    if summary["policy_version"] < summary["updates"]:
        problems.append(
            f"version {summary['policy_version']} is served after {summary['updates']} updates"
        )
    return problems


def _contract(url: str, model: Path, other: Path) -> bool:
    options = ["--engine-url", url, "--engine-model", str(model.resolve())]
    command = [sys.executable, "-m", "pytest", "tests/contract", "-q", *options]
    command += ["--engine-other-model", str(other.resolve())]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0
