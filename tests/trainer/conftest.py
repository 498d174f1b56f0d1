"""What the trainer's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tiny import save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model, which must be left as it is."""
    return save_model(tmp_path_factory.mktemp("model"))
