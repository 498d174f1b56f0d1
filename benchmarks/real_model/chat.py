"""People who chat with the served model through the OpenAI client, and what it does for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import openai

from benchmarks.real_model.wishes import WISHES, Wish, new_request
from examples.tool_lab.evaluate import Rate

MAX_TOKENS = 128
CONCURRENCY = 32
OWN = 4
"""Times as many answers for the rates of the wish as for those of other kinds: the table divides
them, and differences of them, by each other.
"""
SIDE = {"X-Turn-Type": "side"}

Message = dict[str, str]
Rates = dict[str, Rate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, and whether it is complete."""

    text: str
    is_whole: bool


async def reply(
    client: openai.AsyncOpenAI, messages: Sequence[Message], *, is_measured: bool = False
) -> Reply:
    """The answer to a conversation at temperature 1. Raises openai.APIError."""
    completion = await client.chat.completions.create(
        model="policy",
        messages=list(messages),  # pyright: ignore[reportArgumentType]
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        extra_headers=SIDE if is_measured else {},
    )
    [choice] = completion.choices
    return Reply(text=choice.message.content or "", is_whole=choice.finish_reason == "stop")


async def session(
    client: openai.AsyncOpenAI, rng: random.Random, wish: Wish, *, objects: bool
) -> bool:
    """Somebody asks a question of the wish's kind and, if the answer is not as wished, objects or
    leaves; returns whether they objected.
    """
    messages = [{"role": "user", "content": new_request(rng, wish.kind, held_out=False)}]
    first = await reply(client, messages)
    is_content = wish.is_shown(first.text, first.is_whole)
    if not objects or is_content:
        return False
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": rng.choice(wish.objections)},
    ]
    await reply(client, messages)
    return True


async def converse(
    client: openai.AsyncOpenAI, rng: random.Random, wish: Wish, *, quiet: int, objections: int
) -> int:
    """`quiet` people ask questions of all kinds and leave; then others ask until `objections` of
    them objected to an answer, or ten times as many did not. Returns how many objected.
    """
    kinds = list(WISHES.values())
    for number in range(quiet):
        await session(client, rng, kinds[number % len(kinds)], objects=False)
    objected = sessions = 0
    while objected < objections and sessions < 10 * objections:
        objected += await session(client, rng, wish, objects=True)
        sessions += 1
    return objected


async def wished_rate(
    client: openai.AsyncOpenAI, wish: Wish, n: int, seed: int, *, hinted: bool = False
) -> Rate:
    """How many of `OWN * n` answers are as wished; with `hinted`, the hint follows the question.
    The questions are the same.
    """
    rng = random.Random(f"{wish.name}-{seed}")
    questions = [new_request(rng, wish.kind, held_out=True) for _ in range(OWN * n)]
    texts = [f"{question} {wish.hint}" for question in questions] if hinted else questions
    return await _rate(client, texts, wish, wanted=True)


async def rates(client: openai.AsyncOpenAI, wish: Wish, n: int, seed: int) -> Rates:
    """Rates: of `OWN * n` answers each, `wished` and `opposite` (the share that follows an open
    wish for the opposite), and of `n`, for each other kind of request, `usual_NAME`: the share that
    is not as its wish asks.
    """
    found = {"wished": await wished_rate(client, wish, n, seed)}
    rng = random.Random(f"{wish.name}-{seed}-others")
    openly = [
        f"{new_request(rng, wish.kind, held_out=True)} {rng.choice(wish.open_opposites)}"
        for _ in range(OWN * n)
    ]
    found["opposite"] = await _rate(client, openly, wish, wanted=False)
    for other in WISHES.values():
        if other is not wish:
            texts = [new_request(rng, other.kind, held_out=True) for _ in range(n)]
            found[f"usual_{other.name}"] = await _rate(client, texts, other, wanted=False)
    return found


async def _rate(
    client: openai.AsyncOpenAI, texts: Sequence[str], wish: Wish, *, wanted: bool
) -> Rate:
    """The share of answers that show the wish, or, if that is not wanted, do not."""
    at_once = asyncio.Semaphore(CONCURRENCY)

    async def is_so(text: str) -> bool:
        async with at_once:
            found = await reply(client, [{"role": "user", "content": text}], is_measured=True)
        return wish.is_shown(found.text, found.is_whole) is wanted

    said = await asyncio.gather(*map(is_so, texts))
    return Rate(hits=sum(said), count=len(said))
