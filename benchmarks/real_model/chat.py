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


async def rates(
    client: openai.AsyncOpenAI, wish: Wish, n: int, seed: int, *, hinted: bool = False
) -> Rates:
    """Rates of `n` answers each: `wished` (with `hinted`, the hint follows the question), and
    without `hinted` also `opposite` (the share that follows an open wish for the opposite) and, for
    each other kind of request, `usual_NAME`: the share that is not as its wish asks.
    """
    rng = random.Random(f"{wish.name}-{seed}-{hinted}")
    asked: dict[str, list[tuple[str, Wish, bool]]] = {"wished": []}
    for _ in range(n):
        question = new_request(rng, wish.kind, held_out=True)
        text = f"{question} {wish.hint}" if hinted else question
        asked["wished"].append((text, wish, True))
    if not hinted:
        asked["opposite"] = [
            (
                f"{new_request(rng, wish.kind, held_out=True)} {rng.choice(wish.open_opposites)}",
                wish,
                False,
            )
            for _ in range(n)
        ]
        for other in WISHES.values():
            if other is not wish:
                asked[f"usual_{other.name}"] = [
                    (new_request(rng, other.kind, held_out=True), other, False) for _ in range(n)
                ]
    at_once = asyncio.Semaphore(CONCURRENCY)

    async def is_so(text: str, about: Wish, wanted: bool) -> bool:
        async with at_once:
            found = await reply(client, [{"role": "user", "content": text}], is_measured=True)
        return about.is_shown(found.text, found.is_whole) is wanted

    answers = {
        name: await asyncio.gather(*(is_so(*one) for one in of_name))
        for name, of_name in asked.items()
    }
    return {name: Rate(hits=sum(said), count=len(said)) for name, said in answers.items()}
