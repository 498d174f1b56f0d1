"""The trainer with an embedded engine in a process of its own, over HTTP."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from records.store import Store
from records.types import ReadySample, VersionSpan
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.served import ServedFile
from rollout_bridge.engine.types import SamplingParams
from tests.records.new_store import new_store
from tests.trainer.step.test_loop import settings
from tests.trainer.tiny import make_ready, random_sequences
from trainer.calibration.calibrate import own_logprobs
from trainer.config import LoraConfig
from trainer.errors import CalibrationError
from trainer.model.policy import WithoutAdapters
from trainer.step.loop import EmbeddedTrainer

MODEL = Path(__file__).parents[3] / "examples" / "tool_lab" / "model"
VOCAB = json.loads((MODEL / "config.json").read_text())["vocab_size"]
SEQUENCES = random_sequences(VOCAB, [40, 150], seed=3)


@asynccontextmanager
async def engine(*arguments: str):
    """A running engine and its client."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "rollout_bridge.embedded", "--model", str(MODEL), *arguments],
        stdout=asyncio.subprocess.PIPE,
        cwd=MODEL.parents[2],
    )
    assert process.stdout is not None
    try:
        port = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["port"]
        client = EngineClient(
            f"http://127.0.0.1:{port}", config=EngineClientConfig(), vocab_size=VOCAB
        )
        async with client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def roll_out(client: EngineClient, number: int, temperature: float) -> ReadySample:
    """A sampled response to a random prompt; the teacher is the engine with a longer prompt."""
    generator = np.random.default_rng(number)
    prompt = generator.integers(0, VOCAB, size=30 + number).astype(np.int32)
    params = SamplingParams(temperature=temperature, max_new_tokens=8 + number)
    reply = await client.generate(prompt, params)
    hinted = np.concatenate([prompt[:5], prompt])
    teacher = await client.score(np.concatenate([hinted, reply.output_ids]), len(hinted))
    assert reply.weight_version is not None
    length = len(reply.output_ids)
    return ReadySample(
        turn_id=f"v{reply.weight_version}-{number}",
        session_id=f"s{number}",
        prompt_ids=prompt,
        response_ids=reply.output_ids,
        rollout_logprobs=reply.output_logprobs,
        teacher_logprobs=teacher,
        temperature=temperature,
        distribution_modified=None,
        version_spans=(VersionSpan(version=int(reply.weight_version), start=0, end=length),),
        hint="hint",
        created_at=0.0,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_rollouts_calibration_steps_and_publication(tmp_path, temperature):
    async with (
        engine() as client,
        await Store.open(new_store(tmp_path / "records.db")) as store,
    ):
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=settings(),
            run_folder=tmp_path,
            model=str(MODEL),
            engines={"policy": client},
        )
        noise = (await trainer.calibrate(SEQUENCES)).noise
        assert noise < 1e-4
        for version in range(3):
            numbers = range(4 * version, 4 * version + 4)
            batch = await asyncio.gather(*(roll_out(client, n, temperature) for n in numbers))
            await make_ready(store, batch)
            report = await trainer.step()
            assert report is not None
            assert report.version == version + 1
            # Fresh samples: what the engine reported is what the trainer computes, at the
            # temperature of the sample.
            assert report.metrics["train_rollout_logprob_abs_diff"] < 1e-3
            assert report.metrics["tis_abs"] < 1e-3
            assert report.metrics["teacher_student_absdiff"] > 0.01
            assert report.metrics["staleness_max"] == 0
            assert (await client.model_info()).weight_version == str(version + 1)
            await trainer.calibrate(SEQUENCES)
        await trainer.close()


async def test_an_engine_with_other_weights_is_found_out(tmp_path):
    async with (
        engine() as client,
        await Store.open(new_store(tmp_path / "records.db")) as store,
    ):
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=settings(),
            run_folder=tmp_path,
            model=str(MODEL),
            engines={"policy": client},
        )
        await make_ready(store, await asyncio.gather(*(roll_out(client, n, 1.0) for n in range(4))))
        await trainer.step()
        with pytest.raises(CalibrationError, match="engine frozen"):
            await trainer.calibrate(SEQUENCES, {"frozen": client})
        await trainer.close()


@pytest.mark.parametrize("publish", ["adapter", "merged"])
async def test_a_base_rounded_in_trainer_and_engines_alike(tmp_path, publish):
    lora = settings(lora=LoraConfig(rank=4, alpha=8), base_dtype="bfloat16", publish=publish)
    async with (
        engine("--rounds-start", "true") as client,
        engine() as unrounded,
        await Store.open(new_store(tmp_path / "records.db")) as store,
    ):
        client.served = ServedFile(tmp_path)
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=lora,
            run_folder=tmp_path,
            model=str(MODEL),
            engines={"policy": client},
        )
        assert (await trainer.calibrate(SEQUENCES)).noise < 1e-4
        with pytest.raises(CalibrationError, match="engine frozen differs"):
            await trainer.calibrate(SEQUENCES, {"frozen": unrounded})
        await make_ready(store, await asyncio.gather(*(roll_out(client, n, 1.0) for n in range(4))))
        report = await trainer.step()
        assert report is not None
        assert (await client.model_info()).weight_version == "1"
        # What is published is base and adapters, exact in float32.
        assert (await trainer.calibrate(SEQUENCES)).noise < 1e-4
        client.served = None
        await client.update_weights(str(MODEL), "0")
        start = WithoutAdapters(trainer.updater.policy)
        own = own_logprobs(start, trainer.updater.policy.device)
        scored = [await client.score(ids, 1) for ids in SEQUENCES]
        for ids, found in zip(SEQUENCES, scored, strict=True):
            assert np.abs(found - own(ids)).max() < 1e-4
        await trainer.close()
