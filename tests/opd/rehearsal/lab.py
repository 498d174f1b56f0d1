"""The tool lab's model in a rehearsal: recorded states of its requests, one user's hint in the
memory, and a judge by rule who answers what the lab's own model is not asked here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from examples.tool_lab.cases import Case, contrary_case, evaluation_episode, success_case
from examples.tool_lab.domain import TOOLS
from opd.rehearsal.policy_sampler import PolicySampler
from records.messages import Message
from records.names import TurnState, TurnType
from records.store import Store
from records.types import CapturedTurn, TurnRecord, Verdict, VersionSpan, Vote
from rollout_bridge.rendering.rendering import Rendering

SCOPE = "key"
HINT = "Give temperatures in Celsius."
OPPOSITE = "I want it in Fahrenheit."
OPPOSITES = (
    OPPOSITE,
    "Give me Fahrenheit.",
    "I would like degrees in Fahrenheit.",
    "I need Fahrenheit.",
)
ALSO_OPPOSITE = "Please use Fahrenheit."
NOT_FOLLOWED = "Answer in Kelvin."


class RuleJudge:
    """Answers rehearsal's questions by looking for words. `num_asked` counts them."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def applies(self, hint_text: str, turn: TurnRecord) -> bool | None:
        """The hint speaks of temperatures: it applies where one is about to be told."""
        self.num_asked += 1
        assert hint_text == HINT
        return "temp_c" in str(turn.messages[-1].get("content"))

    async def followed(
        self,
        words: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        response: Message,
    ) -> bool | None:
        """Whether the unit that the words name, and no other, stands in the answer."""
        self.num_asked += 1
        text = str(response.get("content") or "")
        units = [unit for unit in ("Fahrenheit", "Celsius", "Kelvin") if unit in text]
        return units == [unit for unit in ("Fahrenheit", "Celsius", "Kelvin") if unit in words]


async def record_states(
    store: Store,
    policy: PolicySampler,
    rendering: Rendering,
    kind: str,
    site: str,
    count: int,
    words: str = "",
) -> list[str]:
    """Record answers of the policy to `count` requests of a kind, with the user's `words` behind
    each; returns the turns' ids.
    """
    rng = random.Random(f"{kind}-{site}-{words}")
    turn_ids = []
    for number in range(count):
        messages: list[Message] = [*evaluation_episode(rng, kind, site).messages]
        at = max(place for place, one in enumerate(messages) if one["role"] == "user")
        said = f"{messages[at]['content']} {words}".strip()
        messages[at] = {**messages[at], "content": said}
        prompt_ids = rendering.prompt_ids(messages, TOOLS)
        answer = await policy.answer(prompt_ids, TOOLS)
        session = await store.ensure_session(
            scope=SCOPE, external_id=f"{kind}-{site}-{words}-{number}", session_id=None
        )
        turn = CapturedTurn(
            turn_id=uuid4().hex,
            session_id=session,
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
        await store.record_turn(turn, scope=SCOPE)
        turn_ids.append(turn.turn_id)
    return turn_ids


async def object_to(
    store: Store, turn_id: str, words: str = "I wanted Celsius.", hint: str = HINT
) -> None:
    """One user objects to one turn, and the judge's votes make a hint of it."""
    assert await store.set_next_state(turn_id, [{"role": "user", "content": words}])
    [turn] = await store.claim(TurnState.JUDGING, owner="judge", limit=1, ttl_s=60)
    votes = tuple(
        Vote(
            index=index,
            score=1,
            hint=hint,
            text=hint,
            latency_s=0.1,
            prompt_tokens=10,
            completion_tokens=10,
        )
        for index in range(3)
    )
    verdict = Verdict(
        turn_id=turn.turn_id, votes=votes, hint=hint, selection="longest", judge="rule"
    )
    assert await store.commit_verdict("judge", verdict, None)


async def rate(policy: PolicySampler, rendering: Rendering, cases: Sequence[Case]) -> float:
    """Share of the cases that one answer of the policy passes."""
    passed = 0
    for case in cases:
        request = case.request
        prompt_ids = rendering.prompt_ids(request.messages, request.tools)
        answer = await policy.answer(prompt_ids, request.tools)
        [check] = case.checks.values()
        passed += bool(check(answer.message))
    return passed / len(cases)


def wish_cases(count: int) -> list[Case]:
    """Nobody says a unit: is it Celsius?"""
    rng = random.Random("wishes")
    return [success_case(rng, "unit") for _ in range(count)]


def contrary_cases(count: int) -> list[Case]:
    """A user openly asks for Fahrenheit: is it?"""
    rng = random.Random("contrary")
    return [contrary_case(rng, "unit") for _ in range(count)]
