"""Who deletes, for all tests of deletion."""

from __future__ import annotations

import pytest

from records.care.housekeeping import Housekeeping
from records.store import Store
from tests.records.conftest import Clock


@pytest.fixture
def keeper(store: Store, clock: Clock) -> Housekeeping:
    return Housekeeping(store, clock)
