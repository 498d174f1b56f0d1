"""docs/algorithms.md has every section that is cited, and every link to it leads somewhere."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")
ITEMS = "9"
"""The section that is a table of numbered items."""
# A citation may be broken over two lines, also of a comment.
_GAP = r"[ \t]*(?:\n[ \t]*(?:# ?)?)?[ \t]*"
_NUMBER = r"\d+(?:\.\d+)?"
_JOINT = rf"{_GAP}(?:,|-|–|\band\b|\bto\b|\bitems?\b){_GAP}(?:items?{_GAP})?"
CITATION = re.compile(rf"ALGORITHMS{_GAP}({_NUMBER}(?:{_JOINT}{_NUMBER})*)")
NUMBERED = re.compile(r"^##+ (\d+(?:\.\d+)?) ", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def sections(page: str) -> set[str]:
    """Numbers of the headings, and `9 item n` for each row of the table in section 9."""
    found = set(NUMBERED.findall(page))
    table = re.search(rf"^## {ITEMS} .*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| ([\d, ]+) \|", table.group(), re.MULTILINE) if table else []
    items = {number for row in rows for number in re.findall(r"\d+", row)}
    return found | {f"{ITEMS} item {number}" for number in items}


def cited(text: str) -> Iterator[str]:
    """Each section that a text cites; both ends of a range and what lies between them."""
    for citation in CITATION.findall(text):
        last, in_items = "", False
        for joint, number in re.findall(rf"({_JOINT}|^)({_NUMBER})", citation):
            in_items = "item" in joint or (in_items and "." not in number)
            found = f"{ITEMS} item {number}" if in_items else number
            is_range = not in_items and bool(re.search(r"-|–|\bto\b", joint))
            yield from between(last, number) if is_range else [found]
            last = number


def between(first: str, last: str) -> list[str]:
    """The sections of one chapter from behind `first` up to `last`."""
    chapter, begin = first.split(".")
    other, end = last.split(".")
    assert chapter == other, f"a range over two chapters: {first} to {last}"
    return [f"{chapter}.{number}" for number in range(int(begin) + 1, int(end) + 1)]


def broken_links(name: str, text: str) -> list[str]:
    """Links of the file `name` to docs/algorithms.md, or within it, that lead nowhere."""
    anchors = {slug(heading) for heading in HEADING.findall(PAGE)}
    page, file = DOCS / "algorithms.md", ROOT / name
    wrong = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        leads_to = (file.parent / path).resolve() if path else file
        if leads_to == page and anchor and anchor not in anchors:
            wrong.append(f"{name}: {target}")
    return wrong


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Python and Markdown files of the checkout, whether they are committed or not yet."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which files belong to the repository")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, "*.py", "*.md"], cwd=ROOT, capture_output=True, check=True)
    names = {name for name in listed.stdout.decode().split("\0") if name}
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in sorted(names)
        if (ROOT / name).is_file() and ROOT / name != Path(__file__)
    }


def test_every_cited_section_is_there(texts):
    known = sections(PAGE)
    found = {(name, section) for name, text in texts.items() for section in cited(text)}
    assert len({name for name, _ in found}) > 50
    assert sorted(f"{name}: {section}" for name, section in found if section not in known) == []


def test_links_to_the_sections_lead_somewhere(texts):
    pages = {name: text for name, text in texts.items() if name.endswith(".md")}
    assert {"README.md", "docs/objectives.md", "docs/glossary.md"} <= pages.keys()
    assert [link for name, text in pages.items() for link in broken_links(name, text)] == []


def test_every_objective_links_to_its_formula():
    text = (DOCS / "objectives.md").read_text(encoding="utf-8")
    part = text.split("\n## The objectives\n")[1].split("\n## ")[0]
    unlinked = [
        one.split("\n")[0] for one in part.split("\n### ")[1:] if "algorithms.md#" not in one
    ]
    assert unlinked == []


def test_files_that_the_page_names_are_there():
    """A short name stands for a file in one of the folders that the page names."""
    named = set(re.findall(r"`([a-z0-9_/]+\.py|[a-z0-9_]+/[a-z0-9_/]+/)`", PAGE))
    folders = [ROOT, *{(ROOT / path).parent for path in named}, *(ROOT / path for path in named)]
    assert len(named) > 60
    assert [one for one in named if not any((folder / one).exists() for folder in folders)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(ALGORITHMS 2.4).", ["2.4"]),
        ("ALGORITHMS 2.5-2.7", ["2.5", "2.6", "2.7"]),
        ("ALGORITHMS 2.2, 5.3, 6.3 to 6.5)", ["2.2", "5.3", "6.3", "6.4", "6.5"]),
        ("ALGORITHMS 4 and 0.1.", ["4", "0.1"]),
        ("ALGORITHMS 4.3, 4.5 and 9 item 9.", ["4.3", "4.5", "9", "9 item 9"]),
        ("ALGORITHMS 9 items 7 and 8, 7.1", ["9", "9 item 7", "9 item 8", "7.1"]),
        ("(ALGORITHMS\n    0.1), and 3", ["0.1"]),
        ("# ALGORITHMS 3.4,\n    # 3.5", ["3.4", "3.5"]),
        ("ALGORITHMS n.m", []),
    ],
)
def test_citations_are_read(text, expected):
    assert list(cited(text)) == expected


def test_a_missing_section_is_noticed():
    page = PAGE.replace("### 2.6 ", "### 2.60 ").replace("| 12 |", "| 120 |")
    assert sections(PAGE) - sections(page) == {"2.6", "9 item 12"}
    assert broken_links("docs/objectives.md", "[x](algorithms.md#26-nothing)") != []
