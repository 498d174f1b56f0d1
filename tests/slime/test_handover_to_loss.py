"""What the rollout side hands over, through slime's own data path and loss with our hooks."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from records.names import DropReason, TurnState
from records.outcomes.values import TurnValue
from records.store import Store
from records.types import CapturedTurn, ReadySample
from rollout_bridge.slime.probes import Probe
from rollout_bridge.slime.rows import train_rows
from tests.records.builders import TRAINER, a_session, a_turn, following, turn_in
from tests.rollout_bridge.slime.runs import run_values, slime_args
from tests.rollout_bridge.slime.test_host import on_store
from tests.slime.training import StepResult, arguments, prepare_process, run_step
from tests.trainer.slime.batches import samples_of, with_lessons
from tests.trainer.tiny import VOCAB, load, save_model
from trainer.batch.reward_view import reward_facts, view_rewards
from trainer.calibration.calibrate import own_logprobs
from trainer.config import TrainerConfig
from trainer.errors import CalibrationError
from trainer.slime.plan import sample_needs
from trainer.step.update import Updater

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

CONFIGS: dict[str, dict[str, Any]] = {
    "custom_loss": {"beta_kl": 0.0},
    "token_mean": {"beta_kl": 0.0, "aggregation": "token-mean"},
    "rows_mean": {"beta_kl": 0.0, "aggregation": "seq-mean-turn-mean"},
}


@pytest.fixture(scope="module", autouse=True)
def slime_process(slime_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    prepare_process(slime_root, tmp_path_factory.mktemp("gloo") / "store")
    yield
    from megatron.core import mpu

    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def samples(model_folder: Path) -> list[ReadySample]:
    return samples_of(load(model_folder).freeze())


def stepped(
    name: str, samples: list[ReadySample], min_rows: int, model_folder: Path, folder: Path
) -> StepResult:
    """One step of slime on what the rollout function and the convert hook make of `samples`."""
    from rollout_bridge.slime.rollout import convert_samples, row_sample

    config = TrainerConfig.model_validate({"tensorboard": False} | CONFIGS[name])
    args = arguments(config, folder, max_tokens=40)
    gaps = [index % 3 for index in range(len(samples))]
    rows = train_rows(samples, gaps, min_rows=min_rows)
    data = convert_samples(args, [row_sample(row, index) for index, row in enumerate(rows)])
    assert args.global_batch_size == len(rows)
    return run_step(args, data, load(model_folder).model, None)


@pytest.mark.parametrize("rate", [None, 1.0, 0.5], ids=["turns", "lessons", "after a fall"])
def test_four_steps_on_a_batch_end_at_the_embedded_trainers_weights(
    rate: float | None, samples: list[ReadySample], model_folder: Path, tmp_path: Path
) -> None:
    from rollout_bridge.slime.rollout import convert_samples, row_sample

    config = TrainerConfig.model_validate(
        {"tensorboard": False, "beta_kl": 0.0, "epochs_per_batch": 4}
        | {"learning_rate": 1e-2, "adam_eps": 1e-3}
    )
    args = arguments(config, tmp_path, max_tokens=40, rehearses=rate is not None)
    samples = samples if rate is None else with_lessons(samples)
    rows = train_rows(samples, [0] * len(samples), min_rows=4, epochs=4, rate=rate or 1.0)
    data = convert_samples(args, [row_sample(row, index) for index, row in enumerate(rows)])
    assert args.global_batch_size == len(rows) == 4
    assert data["rollout_ids"] == list(range(16))
    policy, twin, start = load(model_folder), load(model_folder), load(model_folder)
    result = run_step(args, data, policy.model, None, config)
    assert len(result.advantages) == 16
    Updater(twin, None, config).update(samples, 0, rate=rate or 1.0)
    moved = 0.0
    for one, other, was in zip(
        *(model.trainable_parameters() for model in (policy, twin, start)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
        moved = max(moved, float((other - was).detach().abs().max()))
    assert moved > 1e-2


@pytest.mark.parametrize("is_off", [False, True])
def test_probes_of_the_engines_are_compared_with_slimes_forward_pass(
    is_off: bool, samples: list[ReadySample], model_folder: Path, tmp_path: Path
) -> None:
    from rollout_bridge.slime.rollout import convert_samples, row_sample

    config = TrainerConfig.model_validate({"tensorboard": False, "beta_kl": 0.0})
    args = arguments(config, tmp_path, max_tokens=40)
    policy = load(model_folder)
    score = own_logprobs(policy, torch.device("cpu"))
    texts = [np.arange(3, 3 + length, dtype=np.int32) for length in (2, 30)]
    probes = [Probe(ids=ids, logprobs=score(ids) + 0.5 * is_off, bound=0.1) for ids in texts]
    rows = train_rows(
        samples,
        [0] * len(samples),
        min_rows=1,
        probes=probes,
    )
    data = convert_samples(args, [row_sample(row, index) for index, row in enumerate(rows)])
    if is_off:
        with pytest.raises(CalibrationError, match="on average over 30 tokens"):
            run_step(args, data, policy.model, None)
        return
    result = run_step(args, data, policy.model, None)
    assert result.rollout["calibration/mean"] < result.rollout["calibration/max"] < 1e-5
    plain = stepped("custom_loss", samples, 1, model_folder, tmp_path)
    for key, wanted in plain.gradients.items():
        torch.testing.assert_close(result.gradients[key], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_rows_change_neither_loss_nor_gradient(
    name: str, samples: list[ReadySample], model_folder: Path, tmp_path: Path
) -> None:
    plain = stepped(name, samples, 1, model_folder, tmp_path)
    padded = stepped(name, samples, 16, model_folder, tmp_path)
    assert max(float(one.abs().max()) for one in plain.gradients.values()) > 1e-4
    for key, wanted in plain.gradients.items():
        torch.testing.assert_close(padded.gradients[key], wanted, atol=1e-6, rtol=1e-5)
    assert padded.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_turns_has_no_gradient(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    result = stepped(name, [], 2, model_folder, tmp_path)
    assert all(float(one.abs().max()) == 0.0 for one in result.gradients.values())
    assert result.metrics["loss"] == 0.0


PROCESS = {"reward_coef": 1.0, "reward_outcome": "only", "reward_baseline": "process"}


def in_a_session(session_id: str, number: int) -> list[CapturedTurn]:
    """Turns of a conversation, the next one's prompt the one before with its answer."""
    turns = [a_turn(session_id, response_ids=[7, 8, 9])]
    for place in range(1, number):
        turns.append(following(turns[-1], response_ids=[10 + place, 11, 12 + place]))
    return turns


async def an_attempt(store: Store, outcome: float, *worth: float | None) -> list[str]:
    """A session at the one task, its turns ready to train and verified: what it came to, and what
    each turn was worth before it was answered.
    """
    turns = in_a_session(await a_session(store), len(worth))
    for turn in turns:
        await turn_in(
            store, TurnState.READY, **{name: getattr(turn, name) for name in turn.__slots__}
        )
    await store.close_session(turns[0].session_id, "done")
    [claimed] = await store.claim_sessions("verifier", limit=1, idle_s=60.0, ttl_s=60.0)
    values = [
        TurnValue(turn_id=turn.turn_id, value=value, tries=0 if value is None else 4)
        for turn, value in zip(turns, worth, strict=True)
    ]
    assert await store.commit_outcome("verifier", claimed, outcome, None, values)
    return [turn.turn_id for turn in turns]


def what_the_embedded_trainer_leases(folder: Path, config: TrainerConfig) -> list[ReadySample]:
    """Two sessions of three and two turns, beside an earlier one that no longer trains."""

    async def work(store: Store) -> list[ReadySample]:
        earlier = await an_attempt(store, 0.0, 0.5, 0.75)
        await store.lease(owner=TRAINER, count=2, ttl_s=60.0, outcomes=config.outcomes())
        for turn_id in earlier:
            assert await store.drop(TRAINER, turn_id, DropReason.STALE)
        await an_attempt(store, 1.0, 0.25, 0.75, 0.5)
        await an_attempt(store, 0.0, 0.25, 0.0)
        leased = await store.lease(
            owner=TRAINER,
            count=5,
            ttl_s=60.0,
            history=config.history,
            outcomes=config.outcomes(),
        )
        assert await store.release_leases(TRAINER) == 5
        return leased

    return on_store(folder, work)


def test_what_turns_were_worth_reaches_slimes_advantages(
    model_folder: Path, tmp_path: Path
) -> None:
    from rollout_bridge.slime.rollout import HindsightDataSource, convert_samples, generate_rollout

    config = TrainerConfig.model_validate(
        {"tensorboard": False, "beta_kl": 0.0, "objective": PROCESS}
    )
    samples = what_the_embedded_trainer_leases(tmp_path, config)
    assert [len(one.session.past) for one in samples] == [1] * 5
    # By their outcome alone, the turns of one session would get the same.
    of_rewards = view_rewards(reward_facts(samples), config.objective).advantages
    assert len(set(of_rewards)) == 5
    values = run_values(tmp_path, rollout_batch_size=5)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    needs = sample_needs(config).model_dump(mode="json")
    run = slime_args(tmp_path, hindsight_needs=needs, rollout_batch_size=5, vocab_size=VOCAB)
    source = HindsightDataSource(run)
    try:
        source.load()
        handed = generate_rollout(run, 0, source).samples
    finally:
        source.close()
    args = arguments(config, tmp_path, max_tokens=40)
    data = convert_samples(args, [row for group in handed for row in group])
    result = run_step(args, data, load(model_folder).model, None)

    carried = [
        (row, turn, carrier.prompt_length)
        for row, carrier in enumerate(data["prompt"])
        for turn in carrier.turns
    ]
    gaps = {turn.sample.turn_id: turn.version_gap for _, turn, _ in carried}
    assert gaps.keys() == {one.turn_id for one in samples}
    policy = load(model_folder)
    updater = Updater(policy, None, config)
    prepared = updater.preparation.prepare(samples, [gaps[one.turn_id] for one in samples], None, 0)
    wanted = updater.accumulate(prepared).advantages
    places = {one.turn_id: place for place, one in enumerate(samples)}
    for row, turn, begin in carried:
        found = result.advantages[row][turn.start - begin : turn.end - begin].numpy()
        np.testing.assert_allclose(found, wanted[places[turn.sample.turn_id]], atol=1e-5)
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(result.gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
