"""By how many nats a hint lowers the least favoured token of an answer: this distinguishes a hint
that the answer lacked from one that it already followed (`scoring.least_fall`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.own_agent.scored import CHUNK_TOKENS, scored
from benchmarks.own_agent.travel import calls_of
from benchmarks.own_agent.turned import HINTS
from benchmarks.own_agent.wishes import WISHES, Wish, shown_by_answer, shown_by_call
from examples.tool_lab.cases import Message, evaluation_episode
from examples.tool_lab.domain import TOOLS
from examples.tool_lab.local_generate import LocalGenerator
from examples.tool_lab.preferences import PREFERENCES
from opd.rehearsal.preparing.effect import part_of_fall
from records.types import Ids
from rollout_bridge.scoring.hinting import hinted_prompt_ids, with_words
from rollout_bridge.scoring.scoring import fall_of
from trainer.model.policy import Policy

MAX_TOKENS = 4096


def hints_for(kind: str, value: str) -> tuple[str, ...]:
    """All hints for a value, the lab's and the benchmark's."""
    return (*PREFERENCES[kind].hints[value], HINTS[kind][value])


def shown_by_reply(wish: Wish, reply: Message) -> str | None:
    """Which value of a wish an assistant message shows; None for neither."""
    calls = calls_of(reply)
    if wish.site == "answer":
        return None if calls else shown_by_answer(wish.kind, str(reply.get("content") or ""))
    arguments = calls[0].arguments if calls else None
    return None if arguments is None else shown_by_call(wish, arguments)


def _wrong_answers(
    generator: LocalGenerator, wish: Wish, n: int, rng: random.Random
) -> list[tuple[list[Message], Ids, Ids]]:
    """Messages, prompt and answer of those of `n` sampled answers that show the wish's opposite."""
    asked = [list(evaluation_episode(rng, wish.errand, wish.site).messages) for _ in range(n)]
    prompts = [generator.rendering.prompt_ids(messages, TOOLS) for messages in asked]
    answers = generator.sample_ids(prompts, 1.0)
    return [
        (messages, prompt, answer)
        for messages, prompt, answer in zip(asked, prompts, answers, strict=True)
        if shown_by_reply(wish, generator.message(answer)) == wish.opposite
    ]


def falls(generator: LocalGenerator, wish: Wish, n: int, seed: int) -> dict[str, list[float]]:
    """Falls by the hint's kind: `right`, `opposite` (what the answer does) or `other kind`. Of `n`
    sampled answers, only those count that show the opposite of the wish.
    """
    rng = random.Random(f"falls-{wish.kind}-{seed}")
    wrong = _wrong_answers(generator, wish, n, rng)
    model = Policy(generator.model, dtype="float32", chunk_tokens=CHUNK_TOKENS)
    plain = scored(model, [(prompt, answer) for _, prompt, answer in wrong])
    found: dict[str, list[float]] = {}
    for name in ("right", "opposite", "other kind"):
        rows = []
        for messages, prompt, answer in wrong:
            hint = rng.choice(_hints(wish, name))
            hinted = hinted_prompt_ids(
                generator.rendering, messages, TOOLS, prompt, hint, MAX_TOKENS
            )
            rows.append((hinted, answer))
        both = zip(plain, scored(model, rows), strict=True)
        pairs = [fall_of(before.logprobs, after.logprobs) for before, after in both]
        found[name] = [fall for fall in pairs if fall is not None]
    return found


def parts_of_words(
    generator: LocalGenerator, wish: Wish, n: int, seed: int, sentences: Sequence[str]
) -> dict[str, list[float]]:
    """For each sentence: which part of the right hint's fall it has itself, added to the request,
    for those of `n` sampled answers that show the opposite of the wish (`part_of_fall`).
    """
    rng = random.Random(f"words-{wish.kind}-{seed}")
    wrong = _wrong_answers(generator, wish, n, rng)
    model = Policy(generator.model, dtype="float32", chunk_tokens=CHUNK_TOKENS)
    rendering = generator.rendering
    hint = PREFERENCES[wish.kind].hints[wish.wanted][0]
    plain = scored(model, [(prompt, answer) for _, prompt, answer in wrong])
    hinted = scored(
        model,
        [
            (hinted_prompt_ids(rendering, messages, TOOLS, prompt, hint, MAX_TOKENS), answer)
            for messages, prompt, answer in wrong
        ],
    )
    found: dict[str, list[float]] = {}
    for words in sentences:
        said = scored(
            model,
            [
                (with_words(rendering, messages, TOOLS, prompt, words, MAX_TOKENS)[1], answer)
                for messages, prompt, answer in wrong
            ],
        )
        parts = [
            part_of_fall(*(one.logprobs for one in three))
            for three in zip(plain, hinted, said, strict=True)
        ]
        found[words] = [part for part in parts if part is not None]
    return found


def _hints(wish: Wish, name: str) -> Sequence[str]:
    if name == "right":
        return hints_for(wish.kind, wish.wanted)
    if name == "opposite":
        return hints_for(wish.kind, wish.opposite)
    return [
        hint
        for other in WISHES.values()
        if other.errand != wish.errand
        for hint in hints_for(other.kind, other.wanted)
    ]


def shown_falls(kind: str, found: Mapping[str, Sequence[float]], least: float) -> str:
    """A line for each kind of hint."""
    lines = []
    for name, values in found.items():
        if not values:
            lines.append(f"{kind:9} {name:10} {0:6}")
            continue
        low, middle, high = np.percentile(values, [5, 50, 95])
        refuted = np.mean(np.asarray(values) < least)
        lines.append(
            f"{kind:9} {name:10} {len(values):6} {low:9.2f} {middle:7.2f} {high:7.2f} "
            f"{refuted:8.2f}"
        )
    return "\n".join(lines)
