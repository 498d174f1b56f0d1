"""Keys and values of prompt prefixes seen before, shared in blocks of 16 tokens.

A tree of blocks: a block is identified by the block before it and its own token ids, compared
exactly, so a hit is never a hash collision. The votes on one turn, the turns of one session and
agents with one system prompt share what is equal. The least recently used leaf is evicted first.
The cache is emptied when the weights change. It knows no requests. Each namespace has its own tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout_bridge.embedded.model.adapters import Adapter
from rollout_bridge.embedded.model.kv_cache import CacheShape, RowCache

BLOCK = 16
"""Tokens in a block."""

_Key = tuple[int | str, tuple[int, ...]]
"""The block before it, or the namespace; and its own ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The known blocks of a sequence; `next_key` names the first unknown full block, if any.
    The rest is computed with `adapter`.
    """

    blocks: tuple[int, ...]
    next_key: _Key | None
    namespace: str = ""
    adapter: Adapter | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are known."""
        return len(self.blocks) * BLOCK


class PrefixCache:
    """At most `max_tokens` tokens. On a CPU the memory is taken as it is used."""

    def __init__(self, shape: CacheShape, max_tokens: int):
        self._shape = shape
        self._max_blocks = max_tokens // BLOCK
        # A block's place in the pool is also its name as a parent.
        self._blocks: OrderedDict[_Key, int] = OrderedDict()
        self._free = list(range(self._max_blocks))
        # Not zeroed: a block is written before it is read, and untouched pages cost nothing.
        prefix = (shape.num_layers, self._max_blocks, BLOCK, shape.num_heads)
        where: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        self._keys = torch.empty(*prefix, shape.key_size, **where)
        self._values = torch.empty(*prefix, shape.value_size, **where)

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget everything (the memory is kept)."""
        self._blocks.clear()
        self._free = list(range(self._max_blocks))

    def match(self, ids: Sequence[int], namespace: str = "") -> Match:
        """The longest known prefix of `ids`, in whole blocks."""
        if self._max_blocks == 0:
            return Match(blocks=(), next_key=None, namespace=namespace)
        blocks: list[int] = []
        path: list[_Key] = []
        parent: int | str = namespace
        next_key: _Key | None = None
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = (parent, tuple(ids[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                next_key = key
                break
            blocks.append(block)
            path.append(key)
            parent = block
        self._touch(path)
        return Match(blocks=tuple(blocks), next_key=next_key, namespace=namespace)

    def load(self, match: Match, cache: RowCache, row: int) -> None:
        """Copy the matched blocks into the beginning of a row."""
        if not match.blocks:
            return
        index = torch.tensor(match.blocks, device=self._shape.device)
        count = match.num_tokens
        cache.keys[:, row, :count] = self._keys.index_select(1, index).flatten(1, 2)
        cache.values[:, row, :count] = self._values.index_select(1, index).flatten(1, 2)

    def insert(self, ids: Sequence[int], cache: RowCache, row: int, namespace: str = "") -> None:
        """Remember the whole blocks of `ids`, whose keys and values are in `row`."""
        known = self.match(ids, namespace)
        if known.next_key is None:
            return
        parent: int | str = known.blocks[-1] if known.blocks else namespace
        first = len(known.blocks)
        # Known blocks were touched by `match`; of a prompt longer than the cache, keep the start.
        last = min(len(ids) // BLOCK, self._max_blocks)
        added: list[int] = []
        path: list[_Key] = []
        for number in range(first, last):
            block = self._take()
            key = (parent, tuple(ids[number * BLOCK : (number + 1) * BLOCK]))
            self._blocks[key] = block
            added.append(block)
            path.append(key)
            parent = block
        if added:
            self._store(added, cache, row, first)
            self._touch(path)
            self.match(ids[: first * BLOCK], namespace)

    def _touch(self, path: list[_Key]) -> None:
        # Leaf first, so that a block is always newer than those after it and the oldest is a leaf.
        for key in reversed(path):
            self._blocks.move_to_end(key)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        # Never a block of the path being inserted: that is newer, and shorter than the cache.
        _, block = self._blocks.popitem(last=False)
        return block

    def _store(self, blocks: list[int], cache: RowCache, row: int, first: int) -> None:
        index = torch.tensor(blocks, device=self._shape.device)
        span = slice(first * BLOCK, (first + len(blocks)) * BLOCK)
        self._keys[:, index] = cache.keys[:, row, span].unflatten(1, (-1, BLOCK))
        self._values[:, index] = cache.values[:, row, span].unflatten(1, (-1, BLOCK))
