"""A run's folder with the lab's model, two made-up versions and recorded states, for evaluations.

Version 2 is the start with so much noise that it can do nothing; version 1 was pruned.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from examples.tool_lab.cases import success_case
from opd.run import config as run_config
from opd.run.defaults import resolve, single_machine
from records.names import TurnState
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL
from tests.records.builders import recorded, turn_in
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.model.policy import Policy

RENDERER = RendererConfig(name="qwen3", enable_thinking=False)


def make_run(folder: Path, model: Path = MODEL) -> Path:
    """Write the run's configuration and checkpoints into a new folder; returns it."""
    folder.mkdir()
    values = single_machine(str(model), folder)
    values["renderer"] = RENDERER.model_dump(exclude_none=True)
    run_config.save(resolve(values, None, []), folder / "config.toml")
    policy = Policy.load(str(model), device="cpu", dtype="float32", chunk_tokens=256)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std())
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.0)
    checkpoints = Checkpoints(folder / "checkpoints", str(model), seed=0)
    parent = checkpoints.open()[-1]
    for version in (1, 2):
        parent = checkpoints.write(
            policy,
            optimizer,
            parent=parent,
            version=version,
            turn_ids=[f"turn-{version}"],
            staleness=[0],
        )
    assert checkpoints.prune([2]) == [1]
    return folder


async def record_states(folder: Path, count: int) -> None:
    """`count` turns of the lab that earned the hint "answer in Celsius next time", each in a
    session of its own, then one whose prompt is no rendered conversation, and one without a hint.
    """
    rendering = Rendering.load(str(MODEL), RENDERER)
    rng = random.Random(0)
    async with await Store.open(run_config.load(folder / "config.toml").store) as store:
        for _ in range(count):
            request = success_case(rng, "unit").request
            response_ids = np.array([*rendering.stop_token_ids[:1]], dtype=np.int32)
            await turn_in(
                store,
                TurnState.SCORING,
                messages=request.messages,
                tools=request.tools,
                prompt_ids=rendering.prompt_ids(request.messages, request.tools),
                response_ids=response_ids,
                sampling={"temperature": 1.0, "max_new_tokens": 32},
            )
        await turn_in(store, TurnState.SCORING)
        await recorded(store)
