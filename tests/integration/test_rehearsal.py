"""One objection becomes a behaviour: hint memory, rehearsal, real engines and the real trainer.

The judge alone is a rule (tests/opd/rehearsal/lab.py). Everything else is what `opd serve`
runs, in one process but for the engines.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.starting import Connections, rehearsal_worker
from opd.rehearsal.worker import RehearsalWorker
from opd.run import config as run_config
from opd.run.config import RunConfig
from records.config import StoreConfig
from records.errors import StoreUnavailable
from records.hints.types import Examination, HintPrompt, HintStatus, PromptKind, RehearsalBlock
from records.lessons.names import LessonKind
from records.store import Store
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.served import ServedFile
from rollout_bridge.rehearsal.journal import read_rows, uptake_of
from rollout_bridge.rendering.rendering import Rendering
from tests.contract.engine_process import embedded_engine
from tests.examples.shipped import MODEL
from tests.opd.rehearsal import lab
from trainer.step.loop import EmbeddedTrainer

STEPS = 16
BATCH = 16


@pytest.fixture(scope="module")
def untrained_url() -> Iterator[str]:
    """An engine for those that train nothing."""
    with embedded_engine(MODEL, "--seed", "0") as url:
        yield url


@dataclass
class Parts:
    """What a rehearsal is made of."""

    config: RunConfig
    store: Store
    policy: EngineClient
    trained: EngineClient
    """The same engine, as the trainer knows it."""
    frozen: EngineClient
    rendering: Rendering
    judge: lab.RuleJudge
    folder: Path

    @property
    def sampler(self) -> PolicySampler:
        """The policy, at temperature 1."""
        return PolicySampler(
            self.policy,
            self.rendering,
            temperature=1.0,
            max_new_tokens=64,
            context_length=2048,
            pause_mode="retract",
            proxy=self.config.proxy,
        )

    def worker(self, owner: str = "rehearsal") -> RehearsalWorker:
        to = Connections(
            store=self.store,
            questions=self.judge,
            policy=self.policy,
            frozen=self.frozen,
            rendering=self.rendering,
        )
        return rehearsal_worker(self.config, to, folder=self.folder, owner=owner)

    async def trainer(self) -> EmbeddedTrainer:
        return await EmbeddedTrainer.open(
            store=self.store,
            config=self.config.trainer,
            run_folder=self.folder,
            model=str(MODEL),
            engines={"policy": self.trained},
            rehearsal=self.config.rehearsal,
        )


TEXTS = (*((text, False) for text in lab.OPPOSITES), (lab.ALSO_OPPOSITE, True))
"""Open wishes that the start model follows, and whether each is held out."""


def configured(folder: Path, policy_url: str, frozen_url: str, **rehearsal: object) -> RunConfig:
    values = {
        "model": str(MODEL),
        "store": {"url": StoreConfig.sqlite(folder / "records.db").url},
        "judge": {"base_url": f"{frozen_url}/v1", "model": str(MODEL)},
        "policy": {"url": policy_url},
        "frozen": {"url": frozen_url},
        "scoring": {"top_k": 8, "context_length": 2048},
        "trainer": {
            "objective": {"name": "topk_tail_reverse_kl", "topk": 8},
            "beta_kl": 0.02,
            "rollout_batch_size": BATCH,
            "learning_rate": 2e-3,
            "lora": {"rank": 8, "alpha": 16},
            "max_steps": STEPS,
            "poll_interval_s": 0.05,
            "tensorboard": False,
            "noise_floor_factor": 0.0,
        },
        "rehearsal": {
            "enabled": True,
            "poll_s": 0.05,
            "max_states": 8,
            "max_keep_states": 4,
            "prompt_samples": 4,
            "obedience_samples": 8,
            "gap_samples": 8,
            "keep_samples": 4,
            "states_every_s": 1.0,
            "max_new_tokens": 64,
            **rehearsal,
        },
    }
    return run_config.build(values)


@asynccontextmanager
async def opened(
    folder: Path, policy_url: str, frozen_url: str, rendering: Rendering, **rehearsal: object
) -> AsyncIterator[Parts]:
    config = configured(folder, policy_url, frozen_url, **rehearsal)
    vocab = rendering.vocab_size
    async with (
        await Store.open(config.store) as store,
        EngineClient(policy_url, vocab_size=vocab, served=ServedFile(folder)) as policy,
        EngineClient(policy_url, vocab_size=vocab) as trained,
        EngineClient(frozen_url, vocab_size=vocab) as frozen,
    ):
        yield Parts(config, store, policy, trained, frozen, rendering, lab.RuleJudge(), folder)


async def remembered(parts: Parts, *texts: tuple[str, bool]) -> str:
    """Recorded states, one objection, and the hint that it left, examined; `texts` are those for
    its exceptions, and whether each is held out. Returns the hint's id.
    """
    store, sampler, rendering = parts.store, parts.sampler, parts.rendering
    weather = await lab.record_states(store, sampler, rendering, "weather", "answer", 6)
    await lab.record_states(store, sampler, rendering, "hotels", "call", 3)
    await lab.record_states(store, sampler, rendering, "money", "answer", 3)
    await lab.object_to(store, weather[0])
    [hint] = await store.claim_hints(owner="examiner", limit=4, ttl_s=60)
    prompts = tuple(
        HintPrompt(
            prompt_id=f"p{number}",
            hint_id=hint.hint_id,
            kind=PromptKind.OPPOSITE,
            text=text,
            held_out=held_out,
            asked=0,
            followed=0,
            dropped=None,
        )
        for number, (text, held_out) in enumerate(texts)
    )
    found = Examination(hint_id=hint.hint_id, is_rule=True, prompts=prompts)
    assert await store.commit_examination("examiner", found)
    return hint.hint_id


@pytest.mark.learning
@pytest.mark.timeout(600)
async def test_one_objection_is_learned_and_open_wishes_are_still_done(
    policy_url: str, lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    async with opened(tmp_path, policy_url, lab_engine, rendering) as parts:
        hint_id = await remembered(parts, *TEXTS, (lab.NOT_FOLLOWED, False))
        wishes, contrary = lab.wish_cases(48), lab.contrary_cases(48)
        before = await lab.rate(parts.sampler, rendering, wishes)
        trainer, stop = await parts.trainer(), asyncio.Event()
        rehearsing = asyncio.create_task(parts.worker().run(stop))
        resting = asyncio.create_task(stopped_at_rest(parts, hint_id, stop))
        async with asyncio.timeout(400):
            await trainer.run(stop)
        stop.set()
        await asyncio.gather(rehearsing, resting)
        await trainer.close()
        after = await lab.rate(parts.sampler, rendering, wishes)
        kept = await lab.rate(parts.sampler, rendering, contrary)
        prompts = {one.text: one for one in await parts.store.hint_prompts(hint_id)}
        hint = await parts.store.hint(hint_id)
    print(f"wish {before:.2f} -> {after:.2f}, contrary {kept:.2f}")
    assert after >= before + 0.3
    assert kept >= 0.8
    assert prompts[lab.NOT_FOLLOWED].dropped is not None
    assert prompts[lab.OPPOSITE].dropped is None
    assert hint is not None
    assert hint.first_gap is not None
    assert hint.gap is not None
    assert hint.gap < hint.first_gap
    assert hint.num_steps > 0
    trained = [manifest["lesson_ids"] for manifest in manifests(tmp_path)]
    assert sum(map(len, trained)) > 0
    rows = read_rows(tmp_path)
    assert rows[0].version == 0
    assert rows[0].hints[0].first_gap == pytest.approx(hint.first_gap)
    assert rows[0].pooled is not None
    assert rows[0].keep is not None
    first, last = (uptake_of(row.hints[:1]) for row in (rows[0], rows[-1]))
    assert first is not None
    assert last is not None
    assert (last.start, last.hinted) == (first.start, first.hinted)
    assert first.is_known
    assert last.now.value > first.now.value


async def stopped_at_rest(parts: Parts, hint_id: str, stop: asyncio.Event) -> None:
    """A hint that rests before the last step has no lessons for it."""
    while not stop.is_set():
        hint = await parts.store.hint(hint_id)
        assert hint is not None
        if hint.status is HintStatus.RESTING:
            stop.set()
        await asyncio.sleep(0.1)


def manifests(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("checkpoints/step_*/manifest.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths[1:]]


@pytest.mark.timeout(300)
async def test_a_hint_without_a_text_that_the_start_follows_is_not_practised(
    untrained_url: str, lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    async with opened(tmp_path, untrained_url, lab_engine, rendering) as parts:
        hint_id = await remembered(parts, (lab.NOT_FOLLOWED, False))
        worker = parts.worker()
        async with asyncio.timeout(120):
            while (hint := await parts.store.hint(hint_id)) is None or hint.is_rule:
                await worker.direct()
                await asyncio.sleep(0.05)
            assert hint.is_rule is None, "the judge is asked to write once more"
            await parts.store.claim_hints(owner="examiner", limit=4, ttl_s=60)
            found = Examination(hint_id=hint_id, is_rule=True)  # it finds nothing new
            assert await parts.store.commit_examination("examiner", found)
            while (hint := await parts.store.hint(hint_id)) is None or hint.block is None:
                await worker.direct()
                await asyncio.sleep(0.05)
        assert hint.block is RehearsalBlock.NO_COUNTER_LESSONS
        assert "the start model does it in 0 of" in (hint.detail or "")
        assert await parts.store.lesson_counts() == {}


@pytest.mark.timeout(300)
async def test_no_state_is_one_at_which_the_user_has_said_so_and_lessons_end_with_their_hint(
    untrained_url: str, lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    async with opened(tmp_path, untrained_url, lab_engine, rendering) as parts:
        said = await lab.record_states(
            parts.store, parts.sampler, rendering, "weather", "answer", 4, "I want it in Celsius."
        )
        hint_id = await remembered(parts, *TEXTS)
        worker = parts.worker()
        await until_planned(parts, worker)
        states = {state.turn_id for state in await parts.store.hint_states(hint_id)}
        assert len(states) >= 3
        assert not states & set(said)
        assert await parts.store.set_hint_status(hint_id, HintStatus.WITHDRAWN, "users objected")
        await worker.direct()
        assert not is_rehearsing(worker)
        left = by_kind(await parts.store.lesson_counts())
        assert set(left) <= {LessonKind.KEEP}


@pytest.mark.timeout(300)
async def test_a_worker_that_dies_is_followed_by_one_that_asks_nothing_twice(
    untrained_url: str, lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    # Eight answers say little of open wishes: the shares are to be those of any other step.
    settings = {"obedience_floor": 0.01}
    async with opened(tmp_path, untrained_url, lab_engine, rendering, **settings) as parts:
        await remembered(parts, *TEXTS)
        await until_planned(parts, parts.worker("first"))
        first = await parts.store.lesson_counts()
        wanted = Counter({LessonKind.HINT: 6, LessonKind.COUNTER: 6, LessonKind.KEEP: 4})
        assert by_kind(first) == wanted
        asked = parts.judge.num_asked
        await until_planned(parts, parts.worker("second"))
        assert await parts.store.lesson_counts() == first, "no lesson is planned twice"
        assert len(read_rows(tmp_path)) == 1, "no version is measured twice"
        assert parts.judge.num_asked - asked <= 12 * 2, "states and texts stand in the store"


@pytest.mark.timeout(300)
async def test_no_version_is_measured_while_lessons_that_hold_an_earlier_one_are_left(
    untrained_url: str,
    lab_engine: str,
    rendering: Rendering,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(tmp_path, untrained_url, lab_engine, rendering) as parts:
        await remembered(parts, *TEXTS)
        worker = parts.worker()

        async def is_down() -> int:
            raise StoreUnavailable("the store is down")

        with monkeypatch.context() as patch:
            patch.setattr(parts.store, "drop_held_lessons", is_down)
            with pytest.raises(StoreUnavailable):
                await until_planned(parts, worker)
        assert read_rows(tmp_path) == [], "a row would say that this is done"
        await until_planned(parts, worker)
        assert len(read_rows(tmp_path)) == 1


@pytest.mark.parametrize(("kind", "knows"), [("engine", True), ("frozen", False)])
async def test_nothing_is_held_where_a_teacher_in_the_trainer_scores_all_samples(
    kind: str,
    knows: bool,
    untrained_url: str,
    lab_engine: str,
    rendering: Rendering,
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, untrained_url, lab_engine, rendering) as parts:
        trainer = parts.config.trainer
        teacher = trainer.teacher.model_copy(update={"kind": kind})
        trainer = trainer.model_copy(update={"teacher": teacher})
        parts.config = parts.config.model_copy(update={"trainer": trainer})
        assert parts.worker()._desk.knows_policy is knows


def is_rehearsing(worker: RehearsalWorker) -> bool:
    """Whether a hint is practised now."""
    return any(one.hint.status is HintStatus.ACTIVE for one in worker._prepared.values())


async def until_planned(parts: Parts, worker: RehearsalWorker) -> None:
    async with asyncio.timeout(150):
        while not await parts.store.lesson_counts() or not is_rehearsing(worker):
            await worker.direct()
            await asyncio.sleep(0.05)


def by_kind(counts: dict) -> Counter:
    found: Counter = Counter()
    for (kind, _), number in counts.items():
        found[kind] += number
    return found


class StrictJudge(lab.RuleJudge):
    """Of the answers to open wishes after the start, it accepts neither the first four nor every
    fifteenth.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.num_later = 0

    async def followed(self, *asked: Any) -> bool | None:
        found = await super().followed(*asked)
        self.num_later += bool(read_rows(self.folder))
        is_refused = 0 < self.num_later <= 4 or (self.num_later and self.num_later % 15 == 0)
        return found and not is_refused


@pytest.mark.timeout(300)
async def test_a_step_that_wins_open_wishes_back_holds_what_the_hint_taught(
    policy_url: str, lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    settings = {"obedience_samples": 20, "obedience_floor": 0.9}
    async with opened(tmp_path, policy_url, lab_engine, rendering, **settings) as parts:
        parts.judge = StrictJudge(tmp_path)
        hint_id = await remembered(parts, *TEXTS)
        trainer, stop = await parts.trainer(), asyncio.Event()
        working = [asyncio.create_task(one.run(stop)) for one in (trainer, parts.worker())]
        async with asyncio.timeout(200):
            while len(manifests(tmp_path)) < 2:
                assert not any(one.done() for one in working)
                await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*working)
        await trainer.close()
        row = read_rows(tmp_path)[1]
        assert row.obedience is not None
        assert row.obedience.followed < 0.9 * row.obedience.asked
        lessons = [await parts.store.lesson(one) for one in manifests(tmp_path)[1]["lesson_ids"]]
    step = [one for one in lessons if one is not None and one.sample is not None]
    found = Counter((one.kind, one.hint_id) for one in step)
    counter, keep = (LessonKind.COUNTER, hint_id), LessonKind.KEEP
    assert found == {counter: 8, (keep, hint_id): 4, (keep, None): 4}
    for one in step:
        if one.score is not None and one.kind is keep and one.hint_id is not None:
            assert (one.score.teacher, one.score.teacher_version) == ("policy", "1")
            np.testing.assert_allclose(
                one.score.teacher_logprobs, one.sample.rollout_logprobs, atol=1e-3
            )


@pytest.mark.learning
@pytest.mark.timeout(600)
async def test_what_a_deleted_hint_taught_goes_back(
    policy_url: str, lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    """It was the only one: steps of keep-lessons alone are taken until its states are as before."""
    async with opened(tmp_path, policy_url, lab_engine, rendering) as parts:
        hint_id = await remembered(parts, *TEXTS)
        trainer, stop = await parts.trainer(), asyncio.Event()
        training = asyncio.create_task(trainer.run(stop))
        worker_stop = asyncio.Event()
        rehearsing = asyncio.create_task(parts.worker().run(worker_stop))
        async with asyncio.timeout(200):
            while (hint := await parts.store.hint(hint_id)) is None or hint.num_steps < 2:
                await asyncio.sleep(0.05)
        deleted = await parts.store.delete_hint(hint_id)
        assert deleted is not None
        before = len(manifests(tmp_path))
        worker_stop.set()
        await rehearsing
        worker_stop = asyncio.Event()
        rehearsing = asyncio.create_task(parts.worker("next").run(worker_stop))
        async with asyncio.timeout(300):
            while hint_id not in (rows := read_rows(tmp_path))[-1].returned:
                assert not training.done()
                await asyncio.sleep(0.05)
        stop.set()
        worker_stop.set()
        await asyncio.gather(training, rehearsing)
        await trainer.close()
        steps = manifests(tmp_path)[before:]
        lessons = [
            [await parts.store.lesson(lesson_id) for lesson_id in one["lesson_ids"]]
            for one in steps
        ]
    assert any(hint_id in row.going_back for row in rows), "a version had not gone back yet"
    # The first may have been on its way when the hint was deleted; it goes back after that one.
    kinds = [{lesson.kind for lesson in step if lesson is not None} for step in lessons]
    assert kinds[-1] == {LessonKind.KEEP}
    assert all(step == {LessonKind.KEEP} for step in kinds[1:])
    assert len(lessons[-1]) == BATCH
