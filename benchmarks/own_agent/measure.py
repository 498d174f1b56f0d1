"""What the served policy does, measured through the endpoint at temperature 1, on names that occur
in no text it has learned from. These are side requests: nothing is learned from measurements.

Each answer is one request of somebody who objects to nothing, in a conversation of its own. If a
wish shows in the answer, the policy has made the preceding call itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.own_agent.agent import Endpoint, Message, opening, tool_results
from benchmarks.own_agent.people import TOOLS_OF, Request, new_request
from benchmarks.own_agent.travel import Call, Travel, call_problem
from benchmarks.own_agent.turned import TURNED
from benchmarks.own_agent.wishes import WISHES, Wish, shown_by_answer, shown_by_call
from examples.tool_lab.evaluate import Rate

SIDE = {"X-Turn-Type": "side"}
CONCURRENCY = 32
MAX_CALLS = 3
"""Calls after which a request without an answer counts as not answered."""

Rates = dict[str, Rate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One request to measure for a wish. `opposite`: its words openly ask for the opposite."""

    wish: Wish
    request: Request
    travel: Travel
    opposite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What the policy did: its first call, the call that succeeded with its result, its answer.

    `answer` is None if none was needed to see the wish's value, or none came.
    """

    first: Call | None
    done: Call | None = None
    result: Mapping[str, Any] | None = None
    answer: str | None = None


def tasks_for(wish: Wish, n: int, seed: int, *, opposite: bool) -> list[Task]:
    """`n` requests in which the wish shows; equal seeds give equal ones."""
    rng = random.Random(f"{wish.kind}-{seed}-{opposite}")
    tasks = []
    for _ in range(n):
        travel = Travel(rng=random.Random(rng.randrange(2**40)), held_out=True)
        request = new_request(rng, wish.errand, travel)
        if opposite:
            text = f"{request.text} {rng.choice(wish.open_opposites)}"
            request = Request(errand=request.errand, text=text, slots=request.slots)
        tasks.append(Task(wish=wish, request=request, travel=travel, opposite=opposite))
    return tasks


async def attempt(endpoint: Endpoint, task: Task) -> Attempt:
    """Ask, and run the policy's calls, until the wish's value shows. Raises openai.APIError."""
    messages: list[Message] = opening(task.request.text)
    first: Call | None = None
    done: Call | None = None
    outcome: dict[str, Any] | None = None
    for _ in range(MAX_CALLS):
        reply = await endpoint.reply(messages)
        found = tool_results(reply, task.travel)
        if not found:
            return Attempt(first=first, done=done, result=outcome, answer=str(reply["content"]))
        first = first or found[0][0]
        if task.wish.site == "call":
            return Attempt(first=first)
        for call, result, _ in found:
            if "error" not in result:
                done, outcome = call, result
        messages += [reply, *(message for _, _, message in found)]
    return Attempt(first=first, done=done, result=outcome)


def value_shown(task: Task, made: Attempt) -> str | None:
    """Which value of the task's wish an attempt shows; None for neither, or for no answer."""
    if task.wish.site == "call":
        arguments = made.first.arguments if made.first is not None else None
        return None if arguments is None else shown_by_call(task.wish, arguments)
    if made.answer is None or (task.request.errand in TOOLS_OF and made.result is None):
        return None
    return shown_by_answer(task.wish.kind, made.answer)


def is_valid_call(request: Request, call: Call | None) -> bool:
    """Whether the first call is to the right tool and well formed."""
    is_right = call is not None and call.name == TOOLS_OF[request.errand]
    return is_right and call is not None and call_problem(call) is None


def copies_names(request: Request, call: Call | None) -> bool:
    """Whether the first call has the names and numbers of the request."""
    arguments = call.arguments if call is not None and call.arguments is not None else {}
    return all(arguments.get(key) == value for key, value in request.slots.items())


def tells_facts(request: Request, result: Mapping[str, Any], answer: str) -> bool:
    """Whether an answer tells what the tool returned, in whichever form it chose."""
    words = {word.strip(".,:") for word in answer.split()}
    return {str(fact) for fact in _facts(request, result, answer)} <= words


def _facts(request: Request, result: Mapping[str, Any], answer: str) -> list[Any]:
    slots = request.slots
    if request.errand == "weather":
        degrees = result["temp_c"] if "Celsius" in answer else result["temp_f"]
        return [slots["city"], degrees, result["sky"]]
    if request.errand == "hotels":
        first = result["hotels"][0]
        return [slots["city"], first["name"], *([first["price"]] if "a night" in answer else [])]
    if request.errand == "book":
        return [slots["hotel"], slots["nights"], *([result["code"]] if "code" in answer else [])]
    value = result["value"].split(".")[0] if "about" in answer else result["value"]
    return [slots["amount"], slots["source"], value, slots["target"]]


def rates_of(tasks: Sequence[Task], attempts: Sequence[Attempt]) -> Rates:
    """Rates by name: `wanted_K` and `usual_K`, the shares that show a wish's value and its
    opposite, unasked; `contrary_K`, the share that does the opposite if openly asked for it; and
    `valid_calls`, `copied_names`, `facts` of all requests without an open wish.

    An answer that does not come, or shows neither value, counts against its rate.
    """
    hits: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for task, made in zip(tasks, attempts, strict=True):
        for name, passed in _outcomes(task, made).items():
            hits[name] += passed
            counts[name] += 1
    return {name: Rate(hits=hits[name], count=count) for name, count in counts.items()}


def _outcomes(task: Task, made: Attempt) -> dict[str, bool]:
    wish, shown = task.wish, value_shown(task, made)
    if task.opposite:
        way = "" if wish.wanted == WISHES[wish.kind].wanted else "turned_"
        return {f"contrary_{way}{wish.kind}": shown == wish.opposite}
    outcomes = {
        f"wanted_{wish.kind}": shown == wish.wanted,
        f"usual_{wish.kind}": shown == wish.opposite,
    }
    if wish.errand in TOOLS_OF:
        outcomes["valid_calls"] = is_valid_call(task.request, made.first)
        outcomes["copied_names"] = copies_names(task.request, made.first)
        if made.answer is not None and made.result is not None:
            outcomes["facts"] = tells_facts(task.request, made.result, made.answer)
    return outcomes


async def measure(
    endpoint: Endpoint, kinds: Iterable[str], n: int, seed: int, *, turned: Iterable[str] = ()
) -> Rates:
    """All rates: `n` requests in which each wish shows, and `n` with an open wish for the opposite
    of each of `kinds` and of the reversed wishes in `turned`. Raises openai.APIError.
    """
    openly = [*(WISHES[kind] for kind in kinds), *(TURNED[kind] for kind in turned)]
    tasks = [
        *(task for wish in WISHES.values() for task in tasks_for(wish, n, seed, opposite=False)),
        *(task for wish in openly for task in tasks_for(wish, n, seed, opposite=True)),
    ]
    return rates_of(tasks, await attempts_at(endpoint, tasks))


async def measure_wishes(endpoint: Endpoint, kinds: Iterable[str], n: int, seed: int) -> Rates:
    """`wanted_K` of these kinds alone. Raises openai.APIError."""
    tasks = [task for kind in kinds for task in tasks_for(WISHES[kind], n, seed, opposite=False)]
    rates = rates_of(tasks, await attempts_at(endpoint, tasks))
    return {name: rate for name, rate in rates.items() if name.startswith("wanted_")}


async def attempts_at(endpoint: Endpoint, tasks: Sequence[Task]) -> list[Attempt]:
    """Attempts at all tasks, in their order, as side requests."""
    side = replace(endpoint, headers=SIDE)
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(task: Task) -> Attempt:
        async with gate:
            return await attempt(side, task)

    return list(await asyncio.gather(*(one(task) for task in tasks)))
