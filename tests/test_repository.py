"""The repository holds text, and of everything else only what is known here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BINARIES = {
    "examples/tool_lab/model/model.safetensors",
    # A run folder of an earlier program, which must still open.
    "tests/data/run_83e0f23.tar.xz",
}
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


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
