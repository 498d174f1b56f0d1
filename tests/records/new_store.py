"""A SQLite store for a test: its tables are copied, which takes a twentieth of making them."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from records.config import StoreConfig
from records.store import Store


@cache
def _empty() -> bytes:
    """The file of a store without rows, as `Store.open` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        config = StoreConfig.sqlite(Path(folder) / "records.db")

        async def make() -> None:
            async with await Store.open(config):
                pass

        # The caller may be in a loop of its own.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, make()).result()
        return (Path(folder) / "records.db").read_bytes()


def new_store(path: Path) -> StoreConfig:
    """The configuration of the SQLite store in `path`, which is there when this returns: without
    rows, if it was not.
    """
    if not path.exists():
        path.write_bytes(_empty())
    return StoreConfig.sqlite(path)
