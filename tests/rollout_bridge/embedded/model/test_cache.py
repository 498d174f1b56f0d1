"""The rows of the key-value cache and the tree of known prefixes."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.embedded.model.kv_cache import CacheShape, RowCache
from rollout_bridge.embedded.model.prefix_cache import BLOCK, PrefixCache

SHAPE = CacheShape(
    num_layers=2,
    num_heads=1,
    key_size=1,
    value_size=1,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def fill(cache: RowCache, row: int, ids: list[int]) -> None:
    """Keys and values that say which prefix they belong to."""
    cache.ensure(row + 1, len(ids) + 1, num_used=cache.num_rows)
    for position in range(len(ids)):
        mark = float(hash(tuple(ids[: position + 1])) % 10**6)
        cache.keys[:, row, position] = mark
        cache.values[:, row, position] = -mark


def test_growing_keeps_what_is_used_and_stays_within_memory() -> None:
    cache = RowCache(SHAPE, max_tokens=2048)
    fill(cache, 0, [1, 2, 3])
    kept = cache.keys[:, 0, :3].clone()
    for rows, length in [(2, 10), (5, 300), (6, 341), (1, 2048)]:
        cache.ensure(rows, length, num_used=1)
        assert cache.num_rows >= rows
        assert cache.length >= length
        assert cache.num_rows * cache.length <= 2048
        assert torch.equal(cache.keys[:, 0, :3], kept)
    assert cache.fits(6, 341)
    assert not cache.fits(6, 342)
    assert cache.fits(1, 10**9)


def test_rows_that_no_request_uses_take_no_memory() -> None:
    cache = RowCache(replace(SHAPE, key_size=64, value_size=64), max_tokens=2**20)
    before = resident_bytes()
    cache.ensure(64, 4096, num_used=0)
    assert cache.keys.nbytes + cache.values.nbytes == 2**28
    cache.keys[:, 0, :100] = 1.0
    assert resident_bytes() - before < 2**22
    assert cache.keys[:, 1:].abs().sum() == 0


class Watched:
    """A cache's values that may be copied only when its old keys are gone."""

    def __init__(self, cache: RowCache) -> None:
        self._values, self._keys = cache.values, weakref.ref(cache.keys)

    def __getitem__(self, place: Any) -> torch.Tensor:
        assert self._keys() is None
        return self._values[place]


def test_growing_gives_old_keys_back_before_it_copies_values() -> None:
    cache = RowCache(SHAPE, max_tokens=2048)
    fill(cache, 0, [1, 2, 3])
    kept = cache.values[:, 0, :3].clone()
    cache.values = Watched(cache)  # type: ignore[assignment]
    cache.ensure(1, 1024, num_used=1)
    assert torch.equal(cache.values[:, 0, :3], kept)


def resident_bytes() -> int:
    """Of this process, files not counted. A cache's pages count as shared ones."""
    status = Path("/proc/self/status").read_text()
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
    assert len(found) == 2
    return 1024 * sum(map(int, found))


def test_update_writes_at_positions_and_reads_whole_rows() -> None:
    cache = RowCache(SHAPE, max_tokens=1024)
    cache.ensure(3, 8, num_used=0)
    positions_BT = torch.tensor([[0, 1], [4, 5]])
    cache.begin(1, positions_BT, length=6)
    states = torch.arange(4.0).view(2, 1, 2, 1)
    keys, values = cache.update(states, -states, layer_idx=1)
    assert keys.shape == values.shape == (2, 1, 6, 1)
    assert keys[0, 0, :2, 0].tolist() == [0, 1]
    assert keys[1, 0, 4:, 0].tolist() == [2, 3]
    assert cache.keys[1, 2, 5, 0, 0] == 3
    assert cache.keys[0].abs().sum() == 0


def test_a_namespace_knows_nothing_of_another() -> None:
    cache = RowCache(SHAPE, max_tokens=1024)
    prefixes = PrefixCache(SHAPE, max_tokens=1024)
    ids = list(range(3 * BLOCK))
    fill(cache, 0, ids)
    prefixes.insert(ids, cache, 0, "ann")
    assert prefixes.match(ids, "ann").num_tokens == 3 * BLOCK
    assert prefixes.match(ids, "eve").num_tokens == 0
    assert prefixes.match(ids).num_tokens == 0
    prefixes.insert(ids, cache, 0, "eve")
    assert prefixes.match(ids, "eve").blocks != prefixes.match(ids, "ann").blocks


def test_a_prefix_is_found_in_whole_blocks() -> None:
    cache, prefixes = RowCache(SHAPE, max_tokens=4096), PrefixCache(SHAPE, max_tokens=1024)
    ids = list(range(3 * BLOCK + 5))
    fill(cache, 0, ids)
    prefixes.insert(ids, cache, 0)
    assert prefixes.match(ids).num_tokens == 3 * BLOCK
    assert prefixes.match(ids[: 2 * BLOCK + 1]).num_tokens == 2 * BLOCK
    other = prefixes.match([*ids[: BLOCK + 3], 999, *ids[BLOCK + 4 :]])
    assert other.num_tokens == BLOCK
    assert other.next_key is not None
    prefixes.load(other, cache, 1)
    assert torch.equal(cache.keys[:, 1, :BLOCK], cache.keys[:, 0, :BLOCK])
    prefixes.clear()
    assert prefixes.match(ids).num_tokens == 0


def test_without_memory_nothing_is_remembered() -> None:
    cache, prefixes = RowCache(SHAPE, max_tokens=4096), PrefixCache(SHAPE, max_tokens=0)
    ids = list(range(40))
    fill(cache, 0, ids)
    prefixes.insert(ids, cache, 0)
    match = prefixes.match(ids)
    assert (match.num_tokens, match.next_key) == (0, None)


sequences = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 5 * BLOCK)), max_size=25
)


@settings(max_examples=60)
@given(sequences)
def test_whatever_is_found_belongs_to_the_sequence(steps: list[tuple[int, int, int]]) -> None:
    """Any order of inserts under eviction: a match loads exactly what was computed for it."""
    cache = RowCache(SHAPE, max_tokens=4096)
    prefixes = PrefixCache(SHAPE, max_tokens=6 * BLOCK)
    for first, second, length in steps:
        ids = ([first] * BLOCK * 2 + [second] * BLOCK * 3)[:length]
        fill(cache, 0, ids)
        match = prefixes.match(ids)
        prefixes.load(match, cache, 1)
        known = match.num_tokens
        assert torch.equal(cache.keys[:, 1, :known], cache.keys[:, 0, :known])
        assert torch.equal(cache.values[:, 1, :known], cache.values[:, 0, :known])
        prefixes.insert(ids, cache, 0)
        assert prefixes.match(ids).num_tokens == length // BLOCK * BLOCK
        assert len(prefixes) <= 6
