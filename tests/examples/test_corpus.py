"""The corpus: no held-out names, hints are followed, transcripts carry the right verdict."""

import random
import re

from examples.tool_lab.corpus import HINT_HEADER, hinted_row, random_preferences, rows
from examples.tool_lab.episode import Episode
from examples.tool_lab.names import is_held_out
from examples.tool_lab.transcripts import judged_turns, vote_text
from judge.votes.parsing import parse_answer
from judge.votes.selection import MIN_HINT_CHARS


def test_rows_are_seeded_and_weights_are_on_assistant_messages():
    first, second = list(rows(3, 200)), list(rows(3, 200))
    assert first == second
    for row in first:
        assert any(weight > 0 for weight in row.weights.values())
        assert all(row.messages[index]["role"] == "assistant" for index in row.weights)
        assert row.messages[-1]["role"] == "assistant"


def test_no_held_out_name_in_requests():
    pattern = re.compile(r'"(?:city|hotel)": "([A-Z][a-z]{3,6})"')
    for row in rows(4, 400):
        for message, index in ((m, i) for i, m in enumerate(row.messages)):
            if row.weights.get(index):
                for call in message.get("tool_calls") or ():
                    names = pattern.findall(call["function"]["arguments"])
                    assert not any(is_held_out(name) for name in names)


def test_hint_is_on_the_last_user_message_and_followed():
    for seed in range(300):
        row = hinted_row(random.Random(seed))
        last_user = max(i for i, m in enumerate(row.messages) if m["role"] == "user")
        request, _, hint = row.messages[last_user]["content"].partition(HINT_HEADER)
        assert request
        assert hint
        assert all(index > last_user for index in row.weights)
        text = " ".join(
            m["content"] + "".join(c["function"]["arguments"] for c in m.get("tool_calls") or ())
            for m in row.messages[last_user:]
            if m["role"] == "assistant"
        )
        if "In " in text and "Celsius" in hint.split(", not")[0]:
            assert "In Celsius" in text
        if '"sort"' in text and "by price" in hint.split(", not")[0]:
            assert '"sort": "price"' in text


def test_transcripts_have_parsable_votes_with_usable_hints():
    kinds = set()
    for seed in range(300):
        rng = random.Random(seed)
        episode = Episode(
            seed=seed,
            preferences=random_preferences(rng),
            request_kinds=["weather", "hotels", "book"],
            held_out=False,
            unavailable_probability=0.1,
        )
        for turn in judged_turns(episode, rng, corruption_share=0.3):
            kinds.add(turn.kind)
            score, hint = parse_answer(vote_text(turn.hint))
            assert score == (-1 if turn.hint is None else 1)
            if turn.hint is not None:
                assert turn.hint in turn.acceptable
                assert len(hint) >= MIN_HINT_CHARS
    assert kinds == {
        "success",
        "unavailable",
        "tool_error",
        "declined",
        "corrected",
        "complaint",
        "content",
        "moved_on",
    }
