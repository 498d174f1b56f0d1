"""How the untrained judge reads what people say: objections that it does not understand would
measure only that.

    python -m benchmarks.own_agent.reading --n 16 [--turned]

For each objection to an answer or a call that is not as wished: how often three votes give a hint,
and how often that hint asks for what is wished. For each kind: by how many nats a hint lowers the
least favoured token of such an answer, for right hints, for those that ask for what the answer
does, and for those of other kinds; and which share of each `scoring.least_fall` refutes. Then how
often words speak of the hint (docs/learning.md), for objections and for requests that say nothing
about it. How well open wishes are followed is measured in every cell, at its start. Nothing that
learns reads this.
"""

from __future__ import annotations

import argparse
import json
import random

import numpy as np
import torch

from benchmarks.own_agent.falls import falls, parts_of_words, shown_falls
from benchmarks.own_agent.people import REQUESTS
from benchmarks.own_agent.turned import TURNED
from benchmarks.own_agent.wishes import WISHES, Wish
from examples.tool_lab.cases import evaluation_episode
from examples.tool_lab.episode import Reaction
from examples.tool_lab.local_generate import LocalGenerator
from examples.tool_lab.loop_check import SeenTurn, vote_hints
from examples.tool_lab.preferences import PREFERENCES
from examples.tool_lab.script import scripted_reply
from judge.hints.said import SPOKEN_PART

OBJECTED = Reaction(kind="corrected")
SOME = {
    "city": "Nutc",
    "hotel": "Yajlugu",
    "nights": 5,
    "amount": 30,
    "source": "dollars",
    "target": "euros",
}
"""Values for the requests' placeholders."""


def objected_turn(rng: random.Random, wish: Wish, words: str, *, asks_first: bool) -> SeenTurn:
    """A turn that shows the opposite of a wish, and what follows it with these words."""
    episode = evaluation_episode(rng, wish.errand, wish.site)
    messages = list(episode.messages)
    response = scripted_reply(episode, rng, {wish.kind: wish.opposite})
    told = [message for message in episode.observe(response) if message["role"] == "tool"]
    following = [*told, {"role": "user", "content": words}]
    if told and asks_first:
        following = [{**told[0], "content": json.dumps({"declined": words})}]
    return SeenTurn(messages=messages, response=response, next_state=following, reaction=OBJECTED)


def readings(
    generator: LocalGenerator, wish: Wish, n: int, seed: int, *, asks_first: bool
) -> dict[str, tuple[int, int]]:
    """For each objection: among `n` turns, hints that ask for what is wished, and all hints."""
    rng = random.Random(f"{wish.kind}-{seed}")
    said = [words for words in wish.objections for _ in range(n)]
    turns = [objected_turn(rng, wish, words, asks_first=asks_first) for words in said]
    right = PREFERENCES[wish.kind].hints[wish.wanted]
    found = {words: [0, 0] for words in wish.objections}
    for words, hint in zip(said, vote_hints(generator, turns), strict=True):
        found[words][0] += hint in right
        found[words][1] += hint is not None
    return {words: (hits, hints) for words, (hits, hints) in found.items()}


def main() -> None:
    """Print a line for each sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_agent.reading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", nargs="+", choices=list(WISHES), default=list(WISHES))
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--n", type=int, default=16, help="turns for each sentence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turned", action="store_true", help="the reversed wishes")
    parser.add_argument("--least-fall", type=float, default=0.5, help="like scoring.least_fall")
    parser.add_argument("--asks-first", action="store_true", help="like the benchmark's option")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    generator = LocalGenerator.load(arguments.model)
    wishes = TURNED if arguments.turned else WISHES
    print("right  hint  kind      objection")
    for kind in arguments.kinds:
        of_kind = readings(
            generator, wishes[kind], arguments.n, arguments.seed, asks_first=arguments.asks_first
        )
        for words, (hits, hints) in of_kind.items():
            print(f"{hits / arguments.n:5.2f} {hints / arguments.n:5.2f}  {kind:9} {words}")
    print("\nkind      hint      answers  nats: 5%  median     95%  refuted")
    for kind in arguments.kinds:
        number = arguments.n * len(wishes[kind].objections)
        found = falls(generator, wishes[kind], number, arguments.seed)
        print(shown_falls(kind, found, arguments.least_fall))
    print("\nkind      words spoke of the hint: objections, requests of other kinds")
    for kind in arguments.kinds:
        print(heard(generator, wishes[kind], arguments.n, arguments.seed))


def heard(generator: LocalGenerator, wish: Wish, n: int, seed: int) -> str:
    """A line on how often objections speak of the right hint, and how often requests do."""
    rng = random.Random(f"heard-{wish.kind}-{seed}")
    said = {
        "objections": list(wish.objections),
        "requests": [
            rng.choice(texts).format_map(SOME)
            for errand, texts in REQUESTS.items()
            for _ in range(3)
            if errand != wish.errand
        ],
    }
    rates = []
    for sentences in said.values():
        parts = parts_of_words(generator, wish, n, seed, sentences)
        spoken = [part >= SPOKEN_PART for of_one in parts.values() for part in of_one]
        rates.append(f"{np.mean(spoken):.3f} of {len(spoken)}" if spoken else "no answers")
    return f"{wish.kind:9} {', '.join(rates)}"


if __name__ == "__main__":
    main()
