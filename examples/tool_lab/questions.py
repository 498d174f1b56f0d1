"""The questions to the judge about hints, with the right answers: rows of the corpus, and cases of
the evaluation.

The words of the prompts come from `judge.hints.prompts`; the labels come from the scripted world,
never from words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from examples.tool_lab.corpus import Row, corpus_episode, random_requests
from examples.tool_lab.domain import TOOLS, tool_message
from examples.tool_lab.episode import Episode
from examples.tool_lab.phrases import CORRECTIONS, STATED, phrase_wish
from examples.tool_lab.preferences import PREFERENCES, Preference, preferences_of
from examples.tool_lab.script import scripted_reply, turn_site
from examples.tool_lab.transcripts import JudgedTurn, judged_turns
from judge.hints import prompts
from records.hints.memory import words_of

_OF_RULES = ("corrected", "declined")
_OF_SLIPS = ("tool_error", "complaint")
_OF_NOTHING = ("content", "moved_on", "success", "unavailable")
_ONCE, _NOTHING = "once", "nothing"
_ALL = [(one, value) for one in PREFERENCES.values() for value in (one.default, one.alternative)]
_WEIGHT = 4.0
"""Because an answer is a few tokens after some hundred of its prompt."""
YES, NO, NEITHER = "\\boxed{1}", "\\boxed{-1}", "\\boxed{0}"

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a hint and its right answer: exactly `answer`, or, if a text is written, any
    of `acceptable`. `reason` is what a small judge writes first: what it compares.
    """

    name: str
    messages: Messages
    answer: str
    reason: str = ""
    acceptable: frozenset[str] = frozenset()


def relation(rng: random.Random, held_out: bool) -> Question:
    """The same, the opposite, or neither, a third each."""
    preference, value, hint = _some_hint(rng)
    draw = rng.randrange(3)
    if draw < 2:
        wanted = value if draw == 0 else preference.other(value)
        other, about = _said(rng, preference, wanted), _about(preference, wanted)
    elif rng.random() < 0.3:
        other, about = _objected(rng, held_out, _OF_SLIPS).hint or "", _ONCE
    else:
        another = rng.choice(_others(preference))
        wanted = rng.choice(_values(another))
        other, about = _said(rng, another, wanted), _about(another, wanted)
    pair = [(hint, _about(preference, value)), (other, about)]
    rng.shuffle(pair)
    (first, is_first), (second, is_second) = pair
    return Question(
        name="relation",
        messages=prompts.relation_messages(first, second),
        answer=(YES, NO, NEITHER)[draw],
        reason=f"{is_first}, {is_second}",
    )


def rule(rng: random.Random, held_out: bool) -> Question:
    """Half are rules; others are about one answer only, or about nothing that was said."""
    draw = rng.random()
    if draw < 0.25:
        turn = _objected(rng, held_out, _OF_SLIPS)
        return _rule(turn.hint or "", turn, NO, _ONCE, _ONCE)
    if draw < 0.75:
        turn = _objected(rng, held_out, _OF_RULES)
        said = next(one for one in _ALL if turn.hint in one[0].hints[one[1]])
        hint, about = turn.hint or "", said
        if draw < 0.35:
            about = rng.choice([one for one in _ALL if one != said])
            hint = rng.choice(about[0].hints[about[1]])
        return _rule(hint, turn, YES if about == said else NO, _about(*about), _about(*said))
    turn = _objected(rng, held_out, _OF_NOTHING)
    preference, value, hint = _some_hint(rng)
    return _rule(hint, turn, NO, _about(preference, value), _NOTHING)


def applies(rng: random.Random, held_out: bool) -> Question:
    """Whether a hint is about the next response; half of the answers are yes."""
    episode = _state(rng, held_out, decided=rng.random() < 0.8)
    own = preferences_of(episode.request.kind, turn_site(episode))
    is_own = bool(own) and rng.random() < 0.6
    others = _others(*own)
    near = [one for one in others if one.request_kind == episode.request.kind]
    pool = own if is_own else near if near and rng.random() < 0.4 else others
    preference = rng.choice(pool)
    hint = rng.choice(preference.hints[rng.choice(_values(preference))])
    return Question(
        name="applies",
        messages=prompts.applies_messages(episode.messages, TOOLS, hint),
        answer=YES if is_own else NO,
        reason=f"{own[0].kind if own else turn_site(episode)}, {preference.kind}",
    )


def followed(rng: random.Random, held_out: bool) -> Question:
    """Whether a response does what a hint or a user's words ask for; half of them do."""
    episode = _state(rng, held_out, decided=True)
    [preference] = preferences_of(episode.request.kind, turn_site(episode))
    shown = rng.choice(_values(preference))
    response = scripted_reply(episode, rng, {preference.kind: shown})
    about, asked = preference, shown
    draw = rng.random()
    if draw < 0.4:
        asked = preference.other(shown)
    elif draw < 0.5:
        about = rng.choice(_others(preference))
        asked = rng.choice(_values(about))
    is_hint = rng.random() < 0.4
    words = rng.choice(about.hints[asked]) if is_hint else _wish(rng, about, asked)
    messages = list(episode.messages)
    if not is_hint:
        index = max(at for at, one in enumerate(messages) if one["role"] == "user")
        messages[index] = {**messages[index], "content": f"{messages[index]['content']} {words}"}
    return Question(
        name="followed",
        messages=prompts.followed_messages(messages, TOOLS, response, words),
        answer=YES if about is preference and asked == shown else NO,
        reason=f"{_about(about, asked)}, {_about(preference, shown)}",
    )


def opposite(rng: random.Random, held_out: bool) -> Question:
    """An open wish for the other value."""
    preference, value, hint = _some_hint(rng)
    said = phrase_wish(rng, CORRECTIONS, preference, value)
    if preference.site == "call" and rng.random() < 0.7:
        next_state = [tool_message("call_1", f'{{"declined": "{said}"}}')]
    else:
        next_state = [{"role": "user", "content": said}]
    other = preference.other(value)
    return Question(
        name="opposite",
        messages=prompts.opposite_messages(hint, words_of(next_state)),
        answer=_written(_wish(rng, preference, other)),
        acceptable=_wishes(preference, other),
    )


def outside(rng: random.Random, held_out: bool) -> Question:
    """An open wish about something else."""
    preference, _, hint = _some_hint(rng)
    others = _others(preference)
    about = rng.choice(others)
    return Question(
        name="outside",
        messages=prompts.outside_messages(hint, TOOLS),
        answer=_written(_wish(rng, about, rng.choice(_values(about)))),
        acceptable=frozenset().union(
            *(_wishes(one, value) for one in others for value in _values(one))
        ),
    )


QUESTIONS: Mapping[str, Callable[[random.Random, bool], Question]] = {
    maker.__name__: maker for maker in (relation, rule, applies, followed, opposite, outside)
}


def question_row(rng: random.Random, name: str) -> Row:
    """One question of this name, answered."""
    question = QUESTIONS[name](rng, False)
    answer = {"role": "assistant", "content": f"{question.reason} {question.answer}".strip()}
    return Row(family=name, messages=[*question.messages, answer], tools=[], weights={2: _WEIGHT})


def _rule(hint: str, turn: JudgedTurn, answer: str, asked: str, said: str) -> Question:
    messages = prompts.rule_messages(hint, words_of(turn.next_state))
    return Question(name="rule", messages=messages, answer=answer, reason=f"{asked}, {said}")


def _some_hint(rng: random.Random) -> tuple[Preference, str, str]:
    preference = rng.choice(list(PREFERENCES.values()))
    value = rng.choice(_values(preference))
    return preference, value, rng.choice(preference.hints[value])


def _values(preference: Preference) -> tuple[str, str]:
    return preference.default, preference.alternative


def _said(rng: random.Random, preference: Preference, value: str) -> str:
    """A hint, or a user's words: texts written for exceptions are compared, too."""
    if rng.random() < 0.4:
        return _wish(rng, preference, value)
    return rng.choice(preference.hints[value])


def _written(text: str) -> str:
    return f"[HINT_START]{text}[HINT_END]"


def _wish(rng: random.Random, preference: Preference, value: str) -> str:
    return phrase_wish(rng, STATED, preference, value)


def _wishes(preference: Preference, value: str) -> frozenset[str]:
    """All that `_wish` can say, in lower case."""
    return frozenset(
        template.format(wish=wish).casefold()
        for template in STATED
        for wish in preference.wishes[value]
    )


def _about(preference: Preference, value: str) -> str:
    return f"{preference.kind} {value}"


def _others(*own: Preference) -> list[Preference]:
    return [one for one in PREFERENCES.values() if one not in own]


def _objected(rng: random.Random, held_out: bool, kinds: tuple[str, ...]) -> JudgedTurn:
    """A turn whose reaction is of one of these kinds."""
    while True:
        share = 0.5 if kinds is _OF_SLIPS else 0.0
        episode = corpus_episode(rng, state_probability=0.1, held_out=held_out)
        turns = judged_turns(episode, rng, corruption_share=share, heedless_share=0.3)
        found = [one for one in turns if one.kind in kinds]
        if found:
            return rng.choice(found)


def _state(rng: random.Random, held_out: bool, *, decided: bool) -> Episode:
    """An episode somewhere in the middle; `decided`: a preference decides its next turn."""
    while True:
        kinds = random_requests(rng, 3)
        episode = corpus_episode(rng, request_kinds=kinds, held_out=held_out)
        for _ in range(rng.randrange(10)):
            if not episode.observe(scripted_reply(episode, rng)):
                break
        else:
            is_decided = turn_site(episode) != "farewell" and bool(
                preferences_of(episode.request.kind, turn_site(episode))
            )
            if is_decided or not decided:
                return episode
