import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.local_engine import LocalEngine
from tests.trainer.tiny import VOCAB, load, random_sequences, save_model
from trainer.calibration.calibrate import calibrate, own_logprobs
from trainer.errors import CalibrationError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def own(folder):
    return own_logprobs(load(folder), torch.device("cpu"))


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as one:
        yield one


SEQUENCES = random_sequences(VOCAB, [2, 17, 40], seed=1)


class Shifted(LocalEngine):
    """Adds `shift` to the log-prob at `place` of every long enough sequence."""

    shift, place = 0.0, 0

    async def score(self, input_ids, start):
        scores = (await super().score(input_ids, start)).copy()
        if len(scores) > self.place:
            scores[self.place] += self.shift
        return scores


async def test_equal_weights_pass_and_the_noise_is_kept(folder, own, tmp_path, thread):
    engine = Shifted(folder)
    engine.shift = 1e-4
    result = await calibrate({"policy": (engine, own)}, SEQUENCES, bound=1e-3, thread=thread)
    assert result.num_tokens == 1 + 16 + 39
    assert result.engines["policy"].max_abs == pytest.approx(1e-4, rel=0.05)
    assert result.noise == pytest.approx(3 * 1e-4 / 56, rel=0.05)
    assert result.engines["policy"].spread_max == 0
    assert result.warnings == []
    result.save(tmp_path / "calibration.json")
    saved = json.loads((tmp_path / "calibration.json").read_text())
    assert saved["noise"] == result.noise


async def test_scores_that_differ_from_time_to_time_raise_the_floor_and_are_said(
    folder, own, thread
):
    class Unsteady(LocalEngine):
        num_scored = 0

        async def score(self, input_ids, start):
            self.num_scored += 1
            scores = np.asarray(await super().score(input_ids, start))
            return scores + 0.01 * (-1) ** self.num_scored

    result = await calibrate(
        {"frozen": (Unsteady(folder), own)}, SEQUENCES, bound=0.1, thread=thread
    )
    noise = result.engines["frozen"]
    assert noise.mean_abs == pytest.approx(0.01, rel=0.05)
    assert noise.spread_mean == pytest.approx(0.02, rel=0.05)
    assert result.noise == noise.spread_mean
    [warning] = result.warnings
    assert warning.startswith("engine frozen: the same tokens scored again differ by 2.0e-02 nats")


@pytest.mark.parametrize("place", [0, 38])
async def test_a_gap_at_the_first_or_last_token_is_refused(folder, own, place, thread):
    engine = Shifted(folder)
    engine.shift, engine.place = 0.01, place
    with pytest.raises(CalibrationError, match=rf"engine frozen .*1\.00e-02 at token {place + 1} "):
        await calibrate({"frozen": (engine, own)}, SEQUENCES, bound=1e-3, thread=thread)


async def test_sampled_tokens_are_compared_too(folder, own, thread):
    class Rounded(LocalEngine):
        shift = 5e-4

        async def generate(self, input_ids, params):
            answer = await super().generate(input_ids, params)
            logprobs = answer.output_logprobs.copy()
            logprobs[-1] -= self.shift
            return replace(answer, output_logprobs=logprobs)

    engine = Rounded(folder)
    result = await calibrate({"policy": (engine, own)}, SEQUENCES, bound=1e-3, thread=thread)
    assert result.engines["policy"].sampled_max == pytest.approx(5e-4, rel=0.05)
    assert result.noise < 1e-6
    engine.shift = 0.01
    with pytest.raises(CalibrationError, match=r"policy .* of what it sampled after sequence 0"):
        await calibrate({"policy": (engine, own)}, SEQUENCES, bound=1e-3, thread=thread)


async def test_the_trainer_computes_in_the_thread_that_it_is_given(folder, own, thread):
    computing = thread.submit(threading.get_ident).result()
    found = []

    def watched(ids):
        found.append(threading.get_ident())
        return own(ids)

    await calibrate(
        {"policy": (LocalEngine(folder), watched)}, SEQUENCES, bound=1e-3, thread=thread
    )
    assert len(found) == 2 * len(SEQUENCES)
    assert set(found) == {computing}


async def test_other_weights_are_refused(tmp_path, own, thread):
    other = LocalEngine(str(save_model(tmp_path, seed=9)))
    with pytest.raises(CalibrationError, match="Other weights"):
        await calibrate({"policy": (other, own)}, SEQUENCES, bound=1e-3, thread=thread)


async def test_missing_and_nonfinite_scores_are_refused(folder, own, thread):
    class Short(LocalEngine):
        async def score(self, input_ids, start):
            return (await super().score(input_ids, start))[1:]

    with pytest.raises(CalibrationError, match="log-probs for"):
        await calibrate({"policy": (Short(folder), own)}, SEQUENCES, bound=1e-3, thread=thread)
    engine = Shifted(folder)
    engine.shift = float("nan")
    with pytest.raises(CalibrationError, match="not finite"):
        await calibrate({"policy": (engine, own)}, SEQUENCES, bound=1e-3, thread=thread)


async def test_nothing_to_compare_is_an_error(folder, own, thread):
    with pytest.raises(ValueError, match="needs"):
        await calibrate({}, SEQUENCES, bound=1e-3, thread=thread)


def test_random_sequences_repeat():
    again = random_sequences(VOCAB, [2, 17, 40], seed=1)
    for one, other in zip(SEQUENCES, again, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == np.int32
