"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.run import config as run_config
from tests.records.new_store import new_store


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The configuration of a run whose engines are elsewhere."""
    values: dict[str, Any] = {
        "model": "some/model",
        "store": {"url": new_store(tmp_path / "records.db").url},
        "policy": {"url": "http://127.0.0.1:1"},
        "frozen": {"url": "http://127.0.0.1:2"},
        "judge": {"base_url": "http://127.0.0.1:2/v1", "model": "m", "api_key": "secret"},
        "scoring": {"context_length": 4096},
    }
    path = tmp_path / "config.toml"
    run_config.save(run_config.build(values), path)
    return path
