"""`./run.sh sglang --model FOLDER`: a model of your own learns on one real SGLang server.

`opd serve` with `configs/one_gpu.toml`, in float32 on this CPU: one server answers for policy and
teacher, and each new version reaches it as an adapter, without merging and without a pause. The
people of `benchmarks.real_model` object to answers that are longer than one sentence.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.own_agent.judging import NAME, judging
from benchmarks.own_agent.serving import Served, serving
from benchmarks.real_model.chat import converse, wished_rate
from benchmarks.real_model.judge import RuleJudge
from benchmarks.real_model.wishes import WISHES
from examples.sglang_cpu.server import ROOT, sglang_servers
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.served import ServedFile, ServedVersion
from trainer.calibration.calibrate_run import CALIBRATION_FILE

CONFIG = ROOT / "configs" / "one_gpu.toml"
SEED = 0
QUIET = 9
OBJECTIONS = 3
NEW_TOKENS = 48
"""Of each answer while learning: SGLang is slow on a CPU."""
LONGEST_S = 3600.0
POLL_S = 2.0


def check_adapters(model: Path, folder: Path, *, updates: int, samples: int) -> bool:
    """Learn in `folder` until `updates` adapters were served, print what happened; returns whether
    each was published as an adapter.
    """
    console = Console()
    folder.mkdir(parents=True)
    console.print(f"starting an SGLang server of {model} on this CPU (a minute or two)")
    with sglang_servers(model, folder, "policy") as (server,):
        problems = asyncio.run(_learn(console, model, server.url, folder, updates, samples))
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    return not problems


async def _learn(
    console: Console, model: Path, url: str, folder: Path, updates: int, samples: int
) -> list[str]:
    wish, run = WISHES["sentence"], folder / "run"
    settings = [f"policy.url={url}", f"frozen.url={url}", "trainer.device=cpu"]
    settings += ["trainer.dtype=float32", "trainer.calibration_bound=1e-3"]
    settings += [f"rehearsal.max_new_tokens={NEW_TOKENS}", f"seed={SEED}"]
    async with judging(RuleJudge(seed=SEED)) as judge:
        words = ["--config", str(CONFIG), "--judge-url", judge, "--judge-model", NAME]
        async with serving(run, settings, words, model=model) as served:
            client = served.endpoint.client
            before = await wished_rate(client, wish, samples, SEED)
            console.print(f'"{wish.hint}" holds in {before.shown} before')
            await converse(client, random.Random(SEED), wish, quiet=QUIET, objections=OBJECTIONS)
            versions = await _served_until(console, served, updates)
            async with EngineClient(url) as engine:
                loaded = await engine.adapters()
            after = await wished_rate(client, wish, samples, SEED)
            console.print(f'"{wish.hint}" holds in {after.shown} after')
    console.print(_calibration(run))
    return list(_shortcomings(versions, loaded, updates))


async def _served_until(console: Console, served: Served, updates: int) -> list[ServedVersion]:
    """The versions after the start that were served until there were `updates`, or time was up."""
    file, begun = ServedFile(served.folder), time.monotonic()
    versions: list[ServedVersion] = []
    while len(versions) < updates and time.monotonic() - begun < LONGEST_S:
        await asyncio.sleep(POLL_S)
        if served.process.returncode is not None:
            break
        current = file.current()
        if current is None or current.adapter is None or current in versions:
            continue
        versions.append(current)
        seconds = time.monotonic() - begun
        console.print(
            f"version {current.label} of {updates}: adapter {current.adapter.name}, "
            f"{seconds:.0f} s after the last objection"
        )
    return versions


def _calibration(run: Path) -> str:
    engines = json.loads((run / CALIBRATION_FILE).read_bytes())["engines"]
    return "calibration, engine against trainer: " + "; ".join(
        f"{name} {noise['mean_abs']:.1e} nats, at most {noise['max_abs']:.1e}"
        for name, noise in engines.items()
    )


def _shortcomings(
    versions: Sequence[ServedVersion], loaded: Sequence[str], updates: int
) -> Iterator[str]:
    """What such a run should have shown but did not."""
    if len(versions) < updates:
        yield f"{len(versions)} of {updates} adapters were served"
    newest = versions[-1].adapter if versions else None
    if newest is not None and newest.name not in loaded:
        yield f"the server does not list {newest.name}, only {', '.join(loaded) or 'none'}"
    for version in versions:
        merged = [] if version.adapter is None else Path(version.adapter.path).glob("model*")
        yield from (f"version {version.label} was merged: {file}" for file in merged)
