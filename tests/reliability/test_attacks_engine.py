"""What reaches the embedded engine holds up nobody else: long prompts, large grammars."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.model.grammar import GrammarCompiler
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL
from tests.rollout_bridge.embedded.test_engine import started

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3"))
    stops = frozenset(rendering.stop_token_ids)
    return GrammarCompiler(AutoTokenizer.from_pretrained(MODEL), rendering.vocab_size, stops, 2**20)


def schema(number: int) -> str:
    fields = {f"field_{n}": {"type": "string"} for n in range(number)}
    return json.dumps({"type": "object", "properties": fields})


async def test_a_huge_schema_is_refused_before_it_is_read(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadRequest, match="bytes; at most 1048576 are compiled"):
        await compiler.matcher("json_schema", schema(300_000))


async def test_a_grammar_that_compiles_holds_up_no_known_one(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compiler.matcher("json_schema", schema(2))
    compile_grammar = compiler._compile
    may_end, has_begun = threading.Event(), threading.Event()

    def slow(kind, text):
        has_begun.set()
        assert may_end.wait(60)
        return compile_grammar(kind, text)

    monkeypatch.setattr(compiler, "_compile", slow)
    large = asyncio.create_task(compiler.matcher("json_schema", schema(500)))
    await asyncio.to_thread(has_begun.wait, 60)
    try:
        await asyncio.wait_for(compiler.matcher("json_schema", schema(2)), 60)
        assert not large.done()
    finally:
        may_end.set()
    await large


async def test_a_long_prompt_holds_up_no_reply_for_longer_than_a_piece() -> None:
    """Work of one turn of the loop, in tokens times positions: bounded, whatever the prompt."""
    async with started(Path(MODEL), max_step_cost=2**16, context_length=2_048) as engine:
        costs = costs_of_pieces(engine)
        running = EngineRequest(input_ids=[5] * 20, sampling=Sampling(max_new_tokens=1_000))
        length = engine.context_length - 10
        long = EngineRequest(input_ids=[7, 8] * (length // 2), sampling=Sampling(max_new_tokens=1))
        engine.submit(running)
        engine.submit(long)
        await asyncio.wait_for(long.context.wait(), 600)
        assert long.error is None
        assert len(costs) > 10
        # Never less than 32 tokens are computed together.
        assert max(costs) <= max(2**16 * 2, 32 * length)
        assert len(running.output_ids) >= len(costs) - 2


def costs_of_pieces(engine: Engine) -> list[int]:
    costs: list[int] = []
    runner = engine._scheduler._rows._runner
    forward = runner.forward

    def counting(cache, first_row, ids_BT, positions_BT, length, logits_to_keep):
        if ids_BT.shape[1] > 1:
            costs.append(ids_BT.numel() * length)
        return forward(cache, first_row, ids_BT, positions_BT, length, logits_to_keep)

    runner.forward = counting  # type: ignore[method-assign]
    return costs
