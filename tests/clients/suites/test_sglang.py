"""SGLang's own tests of its OpenAI server, from a checkout (SGLANG_ROOT), against the endpoint.

What each of them does here is kept in sglang_expected.txt, with the reason where it does not pass.
The tests are not ours: nothing of them is copied, and none is changed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.doors.conftest import MODEL, Lab
from tests.clients.suites.conftest import HERE

EXPECTED = HERE.parent / "sglang_expected.txt"
FOLDER = Path("test", "registered", "openai_server")
LEFT_OUT = (
    "basic/test_protocol.py",
    "basic/test_serving_chat.py",
    "basic/test_serving_completions.py",
    "basic/test_serving_embedding.py",
    "basic/test_serving_rerank.py",
    "validation/test_large_max_new_tokens.py",
)
"""Tests of SGLang's classes, without a server; the last one waits for lines of SGLang's log."""

AS_EXPECTED: dict[str, Callable[[str], bool]] = {
    "pass": lambda outcome: outcome == "pass",
    "refused": lambda outcome: "Error code: 400" in outcome and "is not supported" in outcome,
    "theirs": lambda outcome: outcome != "pass",
    # What the model wrote may be at fault, not an error of the endpoint.
    "chance": lambda outcome: outcome == "pass" or outcome.startswith("AssertionError"),
}
"""What an outcome must be, by the word in front of the test in sglang_expected.txt."""


@pytest.fixture(scope="module")
def sglang_root() -> Path:
    """SGLang's source tree; skips the test where there is none."""
    value = os.environ.get("SGLANG_ROOT")
    if not value:
        pytest.skip(
            "no SGLang: set SGLANG_ROOT to a checkout (docs/clients.md says of which commit)"
        )
    root = Path(value).resolve()
    if not (root / FOLDER).is_dir():
        pytest.skip(f"no SGLang: {root} holds no {FOLDER}")
    return root


def read_expected(text: str) -> dict[str, str]:
    """Test id -> one of `AS_EXPECTED`; a reason follows those that do not pass."""
    expected: dict[str, str] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        outcome, test_id, *reason = line.split(maxsplit=2)
        assert outcome in AS_EXPECTED, line
        assert (outcome == "pass") == (not reason), f"a reason is missing or too much: {line}"
        assert test_id not in expected, f"twice: {line}"
        expected[test_id] = outcome
    return expected


def read_outcomes(report: Path) -> dict[str, str]:
    """Test id -> "pass", or the beginning of what went wrong. Skipped tests are left out; a test
    whose sub-tests are reported one by one passes if all do.
    """
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        test_id = f"{case.attrib['classname'].removeprefix('openai_server.')}.{case.attrib['name']}"
        troubles = [*case.iter("failure"), *case.iter("error")]
        if troubles:
            outcomes[test_id] = troubles[0].attrib.get("message", "no message")[:300]
        else:
            outcomes.setdefault(test_id, "pass")
    return outcomes


def changes(expected: dict[str, str], outcomes: dict[str, str]) -> list[str]:
    """The tests that do something else than is expected of them, and what."""
    return [
        f"{test_id}: {expected[test_id]} -> {outcome}"
        for test_id, outcome in outcomes.items()
        if not AS_EXPECTED[expected[test_id]](outcome)
    ]


async def test_outcomes_are_the_expected_ones(lab: Lab, sglang_root: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    python_path = [HERE / "sglang_stubs", sglang_root / "test" / "registered"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pytest", "-q", "-p", "served_model", "-p", "no:cacheprovider"),
        *("-c", os.devnull, "--rootdir", str(sglang_root / "test" / "registered")),
        *("-p", "no:asyncio", f"--junit-xml={report}", "-o", "junit_family=xunit1"),
        *("--timeout=60",),
        *(f"--ignore={sglang_root / FOLDER / name}" for name in LEFT_OUT),
        str(sglang_root / FOLDER),
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, python_path)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SGLANG_ROOT": str(sglang_root),
            "SERVED_URL": lab.url,
            "SERVED_MODEL": MODEL,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert report.exists(), output.decode()[-4000:]
    outcomes = read_outcomes(report)
    expected = read_expected(EXPECTED.read_text(encoding="utf-8"))
    assert outcomes.keys() == expected.keys()
    assert changes(expected, outcomes) == []
