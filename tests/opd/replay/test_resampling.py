"""A sample that takes a recorded turn's place: what of the turn it keeps."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from api_proxy.config import ProxyConfig
from opd.replay.config import ReplayConfig
from opd.replay.importing import SCOPE, ImportSettings, prepare_session
from opd.replay.resampling import PolicyResampler
from records.config import RedactionConfig, StoreConfig
from records.names import TurnState
from records.privacy.redaction import Redactor
from records.store import Store
from records.turns.recording import RecordingKind
from records.types import Verdict
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.examples.shipped import MODEL
from tests.opd.replay.recordings import read, write_lines
from tests.records.looking import list_turns

REDACTION = RedactionConfig(secrets="off", personal="off")
SETTINGS = ImportSettings(context_length=4096, held_out=0.0, renderer="ours")
TALK = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "50 F."},
    {"role": "user", "content": "In Celsius, please."},
]


@pytest.mark.parametrize("value", [None, False, True])
async def test_a_sample_keeps_the_templates_switch_of_its_prompt(
    tmp_path: Path, value: bool | None
) -> None:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3"))
    [session], _ = read(write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}]))
    turn = replace(session.turns[0], enable_thinking=value)
    session = replace(session, turns=(turn,))
    redactor = Redactor(REDACTION)
    rows = prepare_session(session, rendering, redactor, SETTINGS, time.time()).rows
    assert rows is not None
    engine = ScriptedEngine()
    reply = [*rendering.tokenizer.encode("It is 10 C."), rendering.stop_token_ids[0]]
    engine.script.append(Line(ids=reply))
    config = StoreConfig.sqlite(tmp_path / "records.db", redaction=REDACTION)
    async with await Store.open(config) as store:
        await store.import_session(rows)
        [judged] = await store.claim(TurnState.JUDGING, owner="w", limit=1, ttl_s=60)
        hinted = Verdict(
            turn_id=judged.turn_id, votes=(), hint="Celsius.", selection="longest", judge="j"
        )
        assert await store.commit_verdict("w", hinted, None)
        [recorded] = await store.claim(TurnState.SCORING, owner="w", limit=1, ttl_s=60)
        resampler = PolicyResampler(
            store,
            engine,
            rendering,
            ReplayConfig(),
            scope=SCOPE,
            batch_size=1,
            context_length=4096,
            pause_mode="retract",
            proxy=ProxyConfig(),
        )
        assert await resampler.process("w", recorded)
        turns = await store.turns([ref.turn_id for ref in await list_turns(store, limit=9)])
    [sample] = [
        one
        for one in turns
        if one.recording is not None
        and one.recording.kind is RecordingKind.RESAMPLED
        and one.turn_id != recorded.turn_id
    ]
    assert engine.prompts == [rendering.with_thinking(value).prompt_ids(TALK[:1]).tolist()]
    assert sample.sampling.get("enable_thinking") is value
    assert sample.response["content"] == "It is 10 C."
