"""The words of the lab's users: requests, wishes, corrections, thanks. Only templates; other
modules decide who says what.
"""

from __future__ import annotations

import random

from examples.tool_lab.preferences import Preference

REQUESTS: dict[str, tuple[str, ...]] = {
    "greet": (
        "Hello.",
        "Good morning.",
        "Good evening.",
        "Are you there?",
        "I need some help.",
        "Can you help me?",
        "I plan a journey.",
    ),
    "weather": (
        "What is the weather in {city}?",
        "How warm is it in {city}?",
        "Weather for {city} please.",
        "I go to {city} today. How is the weather?",
        "Tell me the temperature in {city}.",
        "Is it cold in {city}?",
        "Check the weather of {city} for me.",
    ),
    "hotels": (
        "Find hotels in {city}.",
        "I need a hotel in {city}.",
        "Where can I stay in {city}?",
        "Show me hotels in {city} please.",
        "Look for a hotel in {city}.",
        "Which hotels does {city} have?",
    ),
    "book": (
        "Book {hotel} for {nights} nights.",
        "I want to stay {nights} nights at {hotel}.",
        "Please book {nights} nights at {hotel}.",
        "Reserve {hotel} for me, {nights} nights.",
    ),
    "money": (
        "How much is {amount} {source} in {target}?",
        "Convert {amount} {source} to {target}.",
        "What are {amount} {source} in {target}?",
        "I have {amount} {source}. How many {target} is that?",
    ),
}
NEXT = ("", "", "Now: ", "Next: ", "And also: ", "One more thing. ", "OK. ", "Fine. ")
STATED = (
    "I want {wish}.",
    "Give me {wish}.",
    "Please give me {wish}.",
    "I would like {wish}.",
    "I need {wish}.",
    "I prefer {wish}.",
)
CORRECTIONS = (
    "No, I want {wish}.",
    "Please give me {wish}.",
    "I want {wish}, not {other}.",
    "Sorry, I need {wish}.",
    "Not {other}. I want {wish}.",
    "Hm, I would like {wish}.",
    "Why {other}? I asked for {wish}.",
    "I prefer {wish}.",
    "Can I have {wish}?",
    "Give me {wish} instead.",
    "{other} does not help me, I need {wish}.",
    "Next time give me {wish}.",
    "I always want {wish}.",
    "Thanks, but I want {wish}.",
    "Could you give me {wish}?",
    "I meant {wish}.",
)
PRAISES = (
    "Great, I wanted {wish}.",
    "Good, {wish}, as I like it.",
    "Thanks for {wish}.",
)
THANKS = (
    "Thanks!",
    "Thank you.",
    "Great, thanks.",
    "Perfect.",
    "Good to know.",
    "OK, thank you.",
    "That is all.",
    "Nice, thanks a lot.",
)
FAREWELL = "You are welcome."
COMPLAINTS = {
    "weather": ("You did not check. I asked for the weather in {city}.",),
    "hotels": ("You did not look. I asked for hotels in {city}.",),
    "book": ("You did not book. I asked for {nights} nights at {hotel}.",),
    "money": ("You did not convert. I asked for {amount} {source} in {target}.",),
}
COMPLAINT_HINTS = {
    "weather": ("Call get_weather for {city}.",),
    "hotels": ("Call find_hotels for {city}.",),
    "book": ("Call book_hotel for {hotel}.",),
    "money": ("Call convert_money for {amount} {source}.",),
}


def sentence(text: str) -> str:
    """`text` with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def phrase_wish(
    rng: random.Random, templates: tuple[str, ...], preference: Preference, value: str
) -> str:
    """One of `templates` about wanting `value` rather than the preference's other value."""
    wish = rng.choice(preference.wishes[value])
    other = rng.choice(preference.wishes[preference.other(value)])
    return sentence(rng.choice(templates).format(wish=wish, other=other))


def surface(rng: random.Random, text: str) -> str:
    """`text` with small irregularities of typing: lower-case start, lost full stop, added word."""
    draw = rng.random()
    if draw < 0.1:
        text = text[:1].lower() + text[1:]
    elif draw < 0.2:
        text = text.rstrip(".")
    elif draw < 0.3:
        text = f"{rng.choice(('Hi.', 'Hello.', 'Well,', 'Hey,', 'So,'))} {text}"
    elif draw < 0.4:
        text = f"{text} {rng.choice(('Thanks.', 'Please.', 'Thank you.', 'OK?'))}"
    return text
