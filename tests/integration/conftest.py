"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.engine_process import embedded_engine
from tests.examples.shipped import MODEL


@pytest.fixture
def policy_url() -> Iterator[str]:
    """An engine of its own: its weights change."""
    with embedded_engine(MODEL, "--seed", "0") as url:
        yield url
