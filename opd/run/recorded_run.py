"""Opening the records of a run to read them: a run that recorded nothing is an error, not an empty
database that is created by looking at it.
"""

from __future__ import annotations

from pathlib import Path

from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.start_checks import check_store
from trainer.errors import StartupError


def load_recorded(config_file: Path) -> RunConfig:
    """The configuration of a run. Raises StartupError if its database does not exist, and
    StoreError if it cannot be opened.
    """
    config = run_config.load(config_file)
    path = config.store.sqlite_path
    if path is not None and not path.is_file():
        raise StartupError(f"no database at {path}: nothing was recorded by {config_file} yet")
    check_store(config.store)
    return config
