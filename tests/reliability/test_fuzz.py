"""The short form of the fuzzer: `python -m tests.reliability.fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.fuzz import fuzz, fuzz_with_keys


@pytest.mark.timeout(1800)
def test_whatever_is_sent_is_answered_refused_in_words_and_recorded(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path, 400, start=1, tell=lambda: None)
    assert not outcome.problems, "\n".join(outcome.problems[:5])
    assert outcome.statuses[200] > 20
    assert outcome.statuses[400] > 20


@pytest.mark.timeout(1800)
def test_who_has_no_key_is_refused_and_has_no_effect(tmp_path: Path) -> None:
    known, unknown = fuzz_with_keys(tmp_path, 300, start=2, tell=lambda: None)
    problems = [*known.problems, *unknown.problems]
    assert not problems, "\n".join(problems[:5])
    assert known.statuses[200] > 10
    assert unknown.statuses[401] > 100
