"""The training conversations of the tool lab's model: agent turns, hinted turns, judge transcripts,
copy tasks.

Every row is a list of chat messages with a weight for each assistant message. Rows are made by
scripts (`script`, `episode`) on training names only; the words of the judge's prompts come from
`judge.prompts`. It knows no tokens.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from examples.tool_lab.corruption import Corruption, corrupted_reply
from examples.tool_lab.domain import TOOLS
from examples.tool_lab.episode import Episode
from examples.tool_lab.names import random_currency, random_name
from examples.tool_lab.preferences import PREFERENCES
from examples.tool_lab.script import scripted_reply, turn_site

HINT_HEADER = "\n\n[user's hint / instruction]\n"
REQUEST_KINDS = ("weather", "hotels", "book", "money")
FIX_HINTS = ("Use the {key} {value}.", "Set {key} to {value}.", "Use {key} {value} in the call.")
# Weather and hotels carry the preferences that the lab trains, so they get the larger share.
REQUEST_WEIGHTS = (3, 3, 2, 2)
GREET_SHARE = 0.25
HINTED_GREET_SHARE = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Shares of the kinds of rows, the loss weight of the turns that a hint decides, and the share
    of judged turns whose assistant does not heed what the user has said.
    """

    agent: float = 0.34
    hinted: float = 0.16
    judge: float = 0.38
    copy: float = 0.12
    hinted_weight: float = 1.0
    heedless: float = 0.0
    questions: tuple[tuple[str, float], ...] = ()
    """Shares of the questions about hints, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One conversation to train on. `weights` maps message indices of assistant messages to loss
    weights.
    """

    family: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    weights: dict[int, float]


def random_preferences(rng: random.Random) -> dict[str, str]:
    """Hidden preferences of a corpus user: for each kind the alternative, the default, or none."""
    preferences = {}
    for kind, preference in PREFERENCES.items():
        draw = rng.random()
        if draw < 0.45:
            preferences[kind] = preference.alternative
        elif draw < 0.6:
            preferences[kind] = preference.default
    return preferences


def random_requests(
    rng: random.Random, max_requests: int = 4, greet_share: float = GREET_SHARE
) -> list[str]:
    """One to `max_requests` requests, short conversations more often; some begin with hello."""
    count = min(1 + int(rng.expovariate(0.8)), max_requests)
    start = ["greet"] if rng.random() < greet_share else []
    return start + rng.choices(REQUEST_KINDS, REQUEST_WEIGHTS, k=count)


def corpus_episode(rng: random.Random, **overrides: Any) -> Episode:
    """An episode on training names."""
    settings: dict[str, Any] = {
        "seed": rng.randrange(2**40),
        "preferences": random_preferences(rng),
        "request_kinds": random_requests(rng),
        "held_out": False,
        "state_probability": 0.2,
        "unavailable_probability": 0.03,
    }
    return Episode(**{**settings, **overrides})


def agent_row(rng: random.Random) -> Row:
    """A whole conversation; wrong turns (made on purpose) have weight 0."""
    episode = corpus_episode(rng)
    weights: dict[int, float] = {}
    while True:
        index = len(episode.messages)
        response, corruption = _reply(episode, rng, corruption_share=0.05)
        weights[index] = 0.0 if corruption else 1.0
        if not episode.observe(response):
            return Row(family="agent", messages=episode.messages, tools=TOOLS, weights=weights)


def _reply(
    episode: Episode, rng: random.Random, *, corruption_share: float
) -> tuple[dict[str, Any], Corruption | None]:
    response = scripted_reply(episode, rng)
    if turn_site(episode) == "call" and rng.random() < corruption_share:
        return corrupted_reply(response, episode, rng)
    return response, None


def hinted_row(rng: random.Random, weight: float = 1.0) -> Row:
    """A conversation whose last user message carries a hint; all assistant turns after it follow
    the hint.
    """
    kinds = ["greet"] if rng.random() < HINTED_GREET_SHARE else random_requests(rng, 3)
    # The user has no wishes for the last request, so that nobody objects to what the hint asks for.
    episode = corpus_episode(rng, request_kinds=kinds, unavailable_probability=0.0)
    for _ in range(40):
        if episode.num_pending == 0 and episode.messages[-1]["role"] == "user":
            break
        if not episode.observe(scripted_reply(episode, rng)):
            break
    if episode.messages[-1]["role"] != "user" or episode.said_farewell:
        return hinted_row(rng, weight)
    episode.user.preferences = {}
    index = len(episode.messages) - 1
    hint, values = random_hint(episode, rng)
    weights = {}
    while True:
        weights[len(episode.messages)] = weight
        following = episode.observe(scripted_reply(episode, rng, values))
        if not following or following[-1]["role"] == "user":
            break
    messages = list(episode.messages[: max(weights) + 1])
    hinted = f"{messages[index]['content']}{HINT_HEADER}{hint}"
    messages[index] = {**messages[index], "content": hinted}
    return Row(family="agent", messages=messages, tools=TOOLS, weights=weights)


def random_hint(episode: Episode, rng: random.Random) -> tuple[str, dict[str, str]]:
    """A hint for the episode's current request and the preference values that it asks for.

    Mostly about one of the request's preferences, either way; sometimes an entity to use, which may
    differ from the one in the request (the hint wins); sometimes about another request's
    preference, which changes nothing here.
    """
    draw = rng.random()
    own = [p for p in PREFERENCES.values() if p.request_kind == episode.request.kind]
    if draw < 0.15 and turn_site(episode) == "call":
        return _entity_hint(episode, rng), {}
    pool = own if draw < 0.9 and own else list(PREFERENCES.values())
    preference = rng.choice(pool)
    value = preference.alternative if rng.random() < 0.6 else preference.default
    return rng.choice(preference.hints[value]), {preference.kind: value}


def _entity_hint(episode: Episode, rng: random.Random) -> str:
    slots = episode.request.slots
    key = rng.choice(sorted(slots))
    if key in ("city", "hotel") and rng.random() < 0.5:
        slots[key] = random_name(rng, held_out=False)
        {"city": episode.world.cities, "hotel": episode.world.hotels}[key].add(slots[key])
    return rng.choice(FIX_HINTS).format(key=key, value=slots[key])


def copy_row(rng: random.Random) -> Row:
    """A request to repeat random text: names, numbers, quoted values."""
    items = [_copy_item(rng) for _ in range(rng.randint(2, 6))]
    text = rng.choice((" ", ", ", "; ")).join(items)
    content = rng.choice(("Repeat: {}", "Say {}", "Copy this.\n{}", "Write {}")).format(text)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": text}]
    return Row(family="copy", messages=messages, tools=[], weights={1: 1.0})


def _copy_item(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.45:
        return random_name(rng, held_out=False)
    if draw < 0.6:
        return str(rng.randint(1, 9999))
    if draw < 0.75:
        return f'"{random_name(rng, held_out=False)}": {rng.randint(1, 99)}'
    if draw < 0.82:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 6)))
    return random_currency(rng, held_out=False)


def rows(seed: int, count: int, mix: Mix | None = None) -> Iterator[Row]:
    """`count` rows, their kinds drawn from `mix`; equal seeds give equal rows."""
    from examples.tool_lab.questions import question_row
    from examples.tool_lab.transcripts import judge_row

    mix = mix or Mix()
    makers: dict[str, Callable[[random.Random], Row]] = {
        "agent": agent_row,
        "hinted": lambda rng: hinted_row(rng, mix.hinted_weight),
        "judge": lambda rng: judge_row(rng, mix.heedless),
        "copy": copy_row,
    }
    makers |= {name: partial(question_row, name=name) for name, _ in mix.questions}
    shares = [mix.agent, mix.hinted, mix.judge, mix.copy, *(share for _, share in mix.questions)]
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.choices(list(makers), shares)[0]
        yield makers[kind](random.Random(rng.randrange(2**60)))
