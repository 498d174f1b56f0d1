"""A parcel desk's users, of whom nothing in the product has heard: their objection becomes a hint
with open wishes for the opposite, is practised, and ends up in a version.

The judge is a rule behind HTTP, asked in the product's own words; the policy is the tool lab's
model, which has not seen a parcel either. Examiner, rehearsal, engines and trainer are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from aiohttp import web

from judge.config import JudgeConfig
from judge.hints import prompts as asked
from judge.hints.examiner import HintExaminer
from judge.hints.questions import HintQuestions
from judge.votes.calls import judge_client
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.starting import Connections, rehearsal_worker
from records.hints.types import PromptKind
from records.lessons.names import LessonKind, LessonState
from records.messages import Message
from records.names import TurnType
from records.store import Store
from records.types import CapturedTurn, VersionSpan
from rollout_bridge.config import ClaimLoopConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.integration.test_rehearsal import Parts, opened
from tests.opd.rehearsal import lab

HINT = "Name the carrier before the day of delivery."
OBJECTION = "I asked for the carrier, and would like to read it first."
WISHES = [f"Please tell me the day first, {name}." for name in ("thanks", "always", "again", "now")]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "track_parcel",
            "description": "Where a parcel is.",
            "parameters": {"type": "object", "properties": {"number": {"type": "string"}}},
        },
    }
]
BOX = "\\boxed{%d}"


class DeskJudge:
    """Answers the six questions for a parcel desk."""

    def __init__(self) -> None:
        self.wishes = list(WISHES)
        self.said: set[str] = set()

    def answer(self, system: str, user: str) -> str:
        """What one vote says."""
        if system == asked.OPPOSITE:
            self.wishes.append(self.wishes.pop(0))
            return f"[HINT_START]{self.wishes[0]}[HINT_END]"
        if system == asked.OUTSIDE:
            return "[HINT_START]I would like to hear about insurance.[HINT_END]"
        if system == asked.RELATION:
            return BOX % (-1 if "day first" in user else 0)
        if system == asked.RULE:
            self.said.add(user)
            return BOX % 1
        if system == asked.APPLIES:
            return BOX % (
                1 if "parcel" in user.split("# Instruction")[0].split("[user]")[-1] else -1
            )
        assert system == asked.FOLLOWED
        return BOX % 1

    async def reply(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        text = self.answer(messages[0]["content"], messages[-1]["content"])
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "rule",
                "choices": [choice],
                "usage": usage,
            }
        )


@pytest.fixture
async def desk() -> AsyncIterator[tuple[DeskJudge, str]]:
    """The judge, and where it answers."""
    judge, app = DeskJudge(), web.Application()
    app.router.add_post("/v1/chat/completions", judge.reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield judge, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def record(store: Store, policy: PolicySampler, rendering: Rendering, text: str) -> str:
    """A request of the desk and what the policy answered."""
    messages: list[Message] = [
        {"role": "system", "content": "You work at a parcel desk."},
        {"role": "user", "content": text},
    ]
    prompt_ids = rendering.prompt_ids(messages, TOOLS)
    answer = await policy.answer(prompt_ids, TOOLS)
    turn = CapturedTurn(
        turn_id=uuid4().hex,
        session_id=await store.ensure_session(scope=lab.SCOPE, external_id=None),
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        messages=messages,
        tools=TOOLS,
        response=answer.message,
        prompt_ids=prompt_ids,
        response_ids=np.asarray(answer.rollout.ids, dtype=np.int32),
        rollout_logprobs=np.asarray(answer.rollout.logprobs, dtype=np.float32),
        token_parent_id=None,
        num_shared_ids=0,
        sampling=answer.sampling,
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=len(answer.rollout.ids)),),
        finish_reason="stop",
        latency_s=0.1,
    )
    await store.record_turn(turn, scope=lab.SCOPE)
    return turn.turn_id


@pytest.mark.timeout(300)
async def test_people_of_another_domain_are_learned_from(
    desk: tuple[DeskJudge, str],
    policy_url: str,
    lab_engine: str,
    rendering: Rendering,
    tmp_path: Path,
) -> None:
    judge, url = desk
    loop = ClaimLoopConfig(poll_min_s=0.02, poll_max_s=0.05)
    config = JudgeConfig(base_url=url, model="rule", votes=1, loop=loop)
    settings = {"obedience_floor": 0.01, "min_messages": 3}
    async with (
        judge_client(config) as client,
        opened(tmp_path, policy_url, lab_engine, rendering, **settings) as parts,
    ):
        parcels = [f"Where is parcel {number}?" for number in range(5)]
        others = [f"When does branch {number} open?" for number in range(3)]
        ids = [await record(parts.store, parts.sampler, rendering, text) for text in parcels]
        kept = [await record(parts.store, parts.sampler, rendering, text) for text in others]
        await lab.object_to(parts.store, ids[0], OBJECTION, HINT)
        questions = HintQuestions(client, config)
        await until_learned(parts, questions, config)
        [hint] = await parts.store.hints()
        states = {one.turn_id for one in await parts.store.hint_states(hint.hint_id)}
        texts = await parts.store.hint_prompts(hint.hint_id)
    assert hint.text == HINT
    assert hint.trained_since == 1
    assert states <= set(ids)
    assert not states & set(kept)
    opposites = {one.text for one in texts if one.kind is PromptKind.OPPOSITE}
    assert opposites == set(WISHES)
    assert any(OBJECTION in one for one in judge.said)


async def until_learned(parts: Parts, questions: HintQuestions, config: JudgeConfig) -> None:
    """Let everybody work until the first version."""
    stop = asyncio.Event()
    examiner = HintExaminer(parts.store, questions, config, "examiner")
    to = Connections(
        store=parts.store,
        questions=questions,
        policy=parts.policy,
        frozen=parts.frozen,
        rendering=parts.rendering,
    )
    rehearsal = rehearsal_worker(parts.config, to, folder=parts.folder, owner="rehearsal")
    trainer = await parts.trainer()
    working = [asyncio.create_task(work) for work in (examiner.loop.run(stop), rehearsal.run(stop))]
    async with asyncio.timeout(200):
        while not trainer.version:
            await trainer.step()
            await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*working)
    await trainer.close()
    totals = await parts.store.lesson_totals()
    assert {kind for kind, state in totals if state is LessonState.TRAINED} == set(LessonKind)
