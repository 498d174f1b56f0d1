"""The questions that the evaluation asks: prompts on held-out names, each with the checks of its
answer.

A case is built by playing an episode with the scripted assistant up to the turn that is measured.
The checks read only the response message; nothing here generates, and no check looks at
probabilities.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from examples.tool_lab.corpus import GREET_SHARE, HINT_HEADER, REQUEST_KINDS, random_preferences
from examples.tool_lab.domain import TOOLS, call_problem
from examples.tool_lab.episode import Episode
from examples.tool_lab.phrases import STATED, phrase_wish
from examples.tool_lab.preferences import (
    OTHER_KINDS,
    PREFERENCES,
    TRAINED_KINDS,
    Preference,
    lab_users,
    shown_in_answer,
    shown_in_call,
)
from examples.tool_lab.questions import QUESTIONS
from examples.tool_lab.script import TOOL_OF, call_arguments, scripted_reply, turn_site
from examples.tool_lab.transcripts import judge_request, judged_turns
from judge.votes.parsing import parse_answer
from judge.votes.selection import MIN_HINT_CHARS

Message = dict[str, Any]
Check = Callable[[Message], bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate from: chat messages and tools."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt and its checks by metric name; a check returns None if it does not apply to the
    answer.
    """

    request: GenerationRequest
    checks: dict[str, Check]


def call_of(response: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Name and parsed arguments of a response's only tool call; None without exactly one parsable
    call.
    """
    calls = response.get("tool_calls") or []
    if len(calls) != 1:
        return None
    function = calls[0]["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except ValueError:
        return None


def shown_value(preference: Preference, response: Mapping[str, Any]) -> str | None:
    """Which of the preference's values a response shows, in its call or its text, or None."""
    call = call_of(response)
    if preference.site == "call":
        return shown_in_call(preference, call[1]) if call else None
    text = str(response.get("content") or "")
    return shown_in_answer(preference, text) if text and not response.get("tool_calls") else None


def evaluation_episode(rng: random.Random, kind: str, site: str) -> Episode:
    """An episode on held-out names whose next turn is `site` of a request of `kind`; three in ten
    have one request before it.

    Its user has no wishes: nothing was said about preferences.
    """
    kinds = [kind]
    if kind != "greet" and rng.random() < 0.3:
        kinds.insert(0, rng.choice([other for other in REQUEST_KINDS if other != kind]))
    episode = Episode(seed=rng.randrange(2**40), preferences={}, request_kinds=kinds, held_out=True)
    while episode.request.kind != kind or turn_site(episode) != site:
        episode.observe(scripted_reply(episode, rng))
    return episode


def _case(episode: Episode, checks: dict[str, Check], suffix: str = "") -> Case:
    messages = list(episode.messages)
    if suffix:
        index = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[index] = {**messages[index], "content": messages[index]["content"] + suffix}
    return Case(request=GenerationRequest(messages=messages, tools=TOOLS), checks=checks)


def success_case(rng: random.Random, kind: str) -> Case:
    """Does the model show the alternative of preference `kind`, unasked?"""
    preference = PREFERENCES[kind]
    episode = evaluation_episode(rng, preference.request_kind, preference.site)

    def check(response: Message) -> bool:
        return shown_value(preference, response) == preference.alternative

    return _case(episode, {f"success_{kind}": check})


def hinted_pair(rng: random.Random, kind: str) -> tuple[GenerationRequest, GenerationRequest]:
    """One prompt in whose answer preference `kind` shows, without and with the hint that asks for
    its alternative.
    """
    preference = PREFERENCES[kind]
    episode = evaluation_episode(rng, preference.request_kind, preference.site)
    hint = rng.choice(preference.hints[preference.alternative])
    plain, hinted = _case(episode, {}), _case(episode, {}, suffix=f"{HINT_HEADER}{hint}")
    return plain.request, hinted.request


def other_preference_case(rng: random.Random) -> Case:
    """Does the model keep the default of a preference that is not trained?"""
    preference = PREFERENCES[rng.choice(OTHER_KINDS)]
    episode = evaluation_episode(rng, preference.request_kind, preference.site)

    def check(response: Message) -> bool:
        return shown_value(preference, response) == preference.default

    return _case(episode, {"other_preferences": check})


def call_case(rng: random.Random) -> Case:
    """Is the call well formed, and are its names and numbers those of the request?"""
    episode = evaluation_episode(rng, rng.choice(REQUEST_KINDS), "call")
    request = episode.request
    expected = call_arguments(request, {"order": "", "room": ""})

    def valid(response: Message) -> bool:
        call = call_of(response)
        return call is not None and call[0] == TOOL_OF[request.kind] and call_problem(*call) is None

    def copied(response: Message) -> bool:
        call = call_of(response)
        return call is not None and all(
            isinstance(call[1], Mapping) and call[1].get(key) == value
            for key, value in expected.items()
            if key not in ("sort", "room")
        )

    return _case(episode, {"valid_calls": valid, "copied_entities": copied})


def facts_case(rng: random.Random) -> Case:
    """Does the answer give the tool result's facts, in whichever form it chose?"""
    episode = evaluation_episode(rng, rng.choice(REQUEST_KINDS), "answer")
    result = episode.result
    assert result is not None

    def check(response: Message) -> bool:
        text = str(response.get("content") or "")
        words = text.replace(",", " ").replace(":", " ").split()
        tokens = [word.rstrip(".") for word in words]
        return all(fact in tokens for fact in _facts(result, text))

    return _case(episode, {"facts_in_answers": check})


def _facts(result: Mapping[str, Any], text: str) -> list[str]:
    """The words that an answer of this form must contain."""
    arguments, value = result["arguments"], result["value"]
    if result["tool"] == "get_weather":
        degrees = value["temp_c"] if "Celsius" in text else value["temp_f"]
        return [str(degrees), arguments["city"], value["sky"]]
    if result["tool"] == "find_hotels":
        hotel = value["hotels"][0]
        price = [str(hotel["price"])] if "a night" in text else []
        return [arguments["city"], hotel["name"], *price]
    if result["tool"] == "book_hotel":
        code = [value["code"]] if "code" in text else []
        return [arguments["hotel"], str(arguments["nights"]), *code]
    amount = value["value"].split(".")[0] if "about" in text else value["value"]
    return [str(arguments["amount"]), arguments["source"], amount, arguments["target"]]


def contrary_case(rng: random.Random, kind: str) -> Case:
    """Does the model follow a user who openly asks for the default of a trained preference?"""
    preference = PREFERENCES[kind]
    episode = evaluation_episode(rng, preference.request_kind, preference.site)
    wish = phrase_wish(rng, STATED, preference, preference.default)

    def check(response: Message) -> bool:
        return shown_value(preference, response) == preference.default

    return _case(episode, {f"contrary_{kind}": check}, suffix=f" {wish}")


def hint_case(rng: random.Random) -> Case:
    """Does the model follow a hint, for any preference and either value?"""
    preference = PREFERENCES[rng.choice(list(PREFERENCES))]
    episode = evaluation_episode(rng, preference.request_kind, preference.site)
    value = preference.alternative if rng.random() < 0.7 else preference.default
    hint = rng.choice(preference.hints[value])

    def check(response: Message) -> bool:
        return shown_value(preference, response) == value

    return _case(episode, {"hint_following": check}, suffix=f"{HINT_HEADER}{hint}")


def judge_case(rng: random.Random) -> Case:
    """Is the vote's decision right, and, if a hint is due, does it ask for the right thing?"""
    while True:
        is_lab = rng.random() < 0.5
        start = ["greet"] if rng.random() < GREET_SHARE else []
        episode = Episode(
            seed=rng.randrange(2**40),
            preferences=lab_users(TRAINED_KINDS) if is_lab else random_preferences(rng),
            request_kinds=start + rng.choices(REQUEST_KINDS, (3, 3, 1, 1), k=rng.randint(1, 3)),
            held_out=True,
            state_probability=0.3,
        )
        turns = judged_turns(episode, rng, corruption_share=0.1, heedless_share=0.25)
        if turns:
            break
    turn = rng.choice(turns)
    due = turn.hint is not None

    def decision(response: Message) -> bool:
        return parse_answer(str(response.get("content") or ""))[0] == (1 if due else -1)

    def usable(response: Message) -> bool | None:
        score, hint = parse_answer(str(response.get("content") or ""))
        if not due:
            return None
        return score == 1 and len(hint) >= MIN_HINT_CHARS and hint in turn.acceptable

    checks: dict[str, Check] = {
        "judge_decision": decision,
        "usable_hint": usable,
        f"judge_{turn.kind}": decision,
    }
    request = GenerationRequest(messages=[*judge_request(turn, TOOLS)], tools=[])
    return Case(request=request, checks=checks)


def question_case(rng: random.Random, name: str) -> Case:
    """Does the judge answer this question about a hint correctly, or write an acceptable text?"""
    question = QUESTIONS[name](rng, True)

    def right(response: Message) -> bool:
        text = str(response.get("content") or "")
        if not question.acceptable:
            return text.strip().endswith(question.answer)
        return parse_answer(text)[1].casefold() in question.acceptable

    request = GenerationRequest(messages=[*question.messages], tools=[])
    return Case(request=request, checks={f"question_{name}": right})
