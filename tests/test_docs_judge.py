"""docs/judge.md tells whoever writes a judge of their own what it is asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from judge.hints import prompts as questions
from judge.votes.prompts import judge_messages
from records.messages import Message

_PAGE = Path(__file__).parents[1] / "docs" / "judge.md"
_ROW = re.compile(r"^\| (You [^|]+) \| ([^|]+) \| ([^|]+.*) \|$", re.MULTILINE)
_USER: Message = {"role": "user", "content": "What is glass?"}
_REPLY: Message = {"role": "assistant", "content": "Sand."}
ASKED = {
    "vote": judge_messages([_USER], [], _REPLY, [_USER]),
    "relation": questions.relation_messages("a", "b"),
    "rule": questions.rule_messages("a", "b"),
    "applies": questions.applies_messages([_USER], [], "a"),
    "followed": questions.followed_messages([_USER], [], _REPLY, "a"),
    "opposite": questions.opposite_messages("a", "b"),
    "outside": questions.outside_messages("a", []),
}


def rows_for(system: str) -> list[tuple[str, str]]:
    """Sections and answer of each row that describes a prompt with this system message."""
    return [
        (sections, answer)
        for begins, sections, answer in _ROW.findall(_PAGE.read_text(encoding="utf-8"))
        if re.match(".*".join(map(re.escape, begins.split(" ..."))), system)
    ]


@pytest.mark.parametrize("name", ASKED)
def test_each_prompt_has_one_row_with_its_sections_and_its_form_of_answer(name: str) -> None:
    system, user = (message["content"] for message in ASKED[name])
    [(sections, answer)] = rows_for(system)
    shown = re.findall(r"^# ([A-Z][a-z]+(?: state)?)", user, re.MULTILINE)
    assert sorted(sections.split(", ")) == sorted(shown)
    for mark in (r"\boxed{", "[HINT_START]"):
        assert (mark in answer) == (mark in system)


def test_there_is_no_row_for_anything_else() -> None:
    assert len(_ROW.findall(_PAGE.read_text(encoding="utf-8"))) == len(ASKED)
