"""The repository holds text, and of everything else only what is known here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from examples.tool_lab.preferences import PREFERENCES

ROOT = Path(__file__).parents[1]
BINARIES = {
    "docs/hint.png",
    "docs/now.png",
    "docs/session.png",
    "docs/sessions.png",
    "docs/training.png",
    "docs/turn.png",
    "examples/tool_lab/model/model.safetensors",
    # A run folder of an earlier program, which must still open.
    "tests/data/run_83e0f23.tar.xz",
}
LABS_WORDS = {"celsius", "fahrenheit", "hotels", "decimals", "captain"}
"""Of the words of its wishes and hints, those that are about nothing else."""
MAX_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def tracked() -> dict[str, bytes]:
    """The files that git tracks, as they lie here: path -> content."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which files belong to the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")
    return {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}


def test_only_known_files_are_binary(tracked: dict[str, bytes]) -> None:
    binaries = {name for name, content in tracked.items() if not _is_text(content)}
    assert binaries == BINARIES


def test_no_file_is_large(tracked: dict[str, bytes]) -> None:
    assert {name for name, content in tracked.items() if len(content) > MAX_BYTES} == set()


PRODUCT = ("api_proxy/", "judge/", "opd/", "records/", "rollout_bridge/", "trainer/")


def test_no_word_of_the_labs_world_is_in_the_product(tracked: dict[str, bytes]) -> None:
    """What the lab's users wish for, and its opposites, the product learns from them alone."""
    texts = [
        word.strip(".,").casefold()
        for kind in PREFERENCES.values()
        for texts in (*kind.wishes.values(), *kind.hints.values())
        for text in texts
        for word in text.split()
    ]
    known = {word for word in texts if len(word) > 4}
    common = known & LABS_WORDS
    assert common == LABS_WORDS, "the lab speaks of other things now"
    pattern = re.compile(rb"\b(" + "|".join(sorted(LABS_WORDS)).encode() + rb")\b", re.I)
    found = {
        f"{name}: {match.group().decode()}"
        for name, content in tracked.items()
        if name.startswith(PRODUCT)
        for match in pattern.finditer(content)
    }
    assert found == set()


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
