"""The short form of the fuzzer: `python -m tests.reliability.fuzz` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from records.config import StoreConfig
from tests.records.conftest import new_database
from tests.reliability.fuzz import fuzz, fuzz_with_keys

pytestmark = pytest.mark.long


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    """An empty database."""
    if request.param == "sqlite":
        yield StoreConfig.sqlite(tmp_path / "records.db")
        return
    with new_database() as url:
        yield StoreConfig(url=url, spill_folder=tmp_path / "spill")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2])
def test_whatever_is_sent_is_answered_refused_in_words_and_recorded(
    database: StoreConfig, workers: int
) -> None:
    outcome = fuzz(database, 450, start=workers, tell=lambda: None, workers=workers)
    assert not outcome.problems, "\n".join(outcome.problems[:5])
    assert outcome.statuses[200] > 10
    assert outcome.statuses[400] > 10


@pytest.mark.timeout(1800)
def test_who_has_no_key_is_refused_and_has_no_effect(database: StoreConfig) -> None:
    known, unknown = fuzz_with_keys(database, 400, start=2, tell=lambda: None)
    problems = [*known.problems, *unknown.problems]
    assert not problems, "\n".join(problems[:5])
    assert known.statuses[200] > 5
    assert unknown.statuses[401] > 60
