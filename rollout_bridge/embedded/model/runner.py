"""The model's computations on rows of the key-value cache: prefill, one decode step, scoring.

It knows tensors and rows, not requests. Attention is causal by position (`masks`): a query at
position p sees keys of 0..p of its row, whatever padding was computed along with it.

Shape legend: B rows, T tokens of a row in one forward, L key positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rollout_bridge.embedded.errors import UnsupportedModel
from rollout_bridge.embedded.model.adapters import AdapterLayers
from rollout_bridge.embedded.model.kv_cache import CacheShape, RowCache
from rollout_bridge.embedded.model.logprobs import normalise
from rollout_bridge.embedded.model.masks import Masks

PREFILL_CHUNK = 1024
"""Most tokens of one row in one forward: bounds the attention mask, [B, 1, T, L]."""
_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)
"""transformers' cache classes for layers whose keys and values fit in rows."""
_SCORE_LOGITS = 2**25
"""Most logits of one forward while scoring (128 MiB in float32)."""


class ModelRunner:
    """Runs one model over a `RowCache` of its shape."""

    def __init__(self, model: PreTrainedModel, context_length: int):
        self.model = model
        self.context_length = context_length
        self.device = model.device
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr]
        self.adapters = AdapterLayers(model, self.device)
        """What the next computations add to the base, and in which rows; nothing by default."""
        self._masks = Masks(model.config, model.dtype, self.device)

    @torch.inference_mode()
    def cache_shape(self) -> CacheShape:
        """What one token takes in this model's cache; raises UnsupportedModel if layers differ."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.zeros(1, 1, dtype=torch.long, device=self.device), past_key_values=cache)
        shapes = set()
        for layer in cache.layers:
            kind = type(layer)
            if kind not in _KINDS or not isinstance(layer, DynamicLayer):
                raise UnsupportedModel(f"a layer caches as {kind.__name__}")
            if layer.keys is None or layer.values is None:
                raise UnsupportedModel("a layer has no keys and values of its own")
            shapes.add((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        if len(shapes) != 1:
            raise UnsupportedModel(f"layers have caches of {len(shapes)} different shapes")
        heads, key_size, value_size = shapes.pop()
        return CacheShape(
            num_layers=len(cache.layers),
            num_heads=heads,
            key_size=key_size,
            value_size=value_size,
            dtype=self.model.dtype,
            device=self.device,
        )

    def forward(
        self,
        cache: RowCache,
        first_row: int,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        length: int,
        logits_to_keep: int,
    ) -> torch.Tensor:
        """Logits [B, logits_to_keep or T (if 0), V] of rows `first_row`..; extends their cache.

        `length`: key positions to attend over, at least every position + 1.
        """
        cache.begin(first_row, positions_BT, length)
        return self.model(
            input_ids=ids_BT,
            attention_mask=self._masks.of(positions_BT, length),
            # Padding may lie beyond the last position that a model has an embedding for.
            position_ids=positions_BT.clamp_max(self.context_length - 1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits

    def prefill(
        self, cache: RowCache, first_row: int, sequences: list[list[int]], starts: list[int]
    ) -> None:
        """Compute `sequences[b][starts[b]:]` into rows `first_row + b`; the cache has room."""
        for ids_BT, positions_BT in self._chunks(sequences, starts, PREFILL_CHUNK):
            length = int(positions_BT.max()) + 1
            self.forward(cache, first_row, ids_BT, positions_BT, length, logits_to_keep=1)

    def score(
        self,
        cache: RowCache,
        first_row: int,
        sequences: list[list[int]],
        starts: list[int],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[range]]]:
        """Log-probs of `sequences[b][starts[b]:]`, with tokens before `starts[b] - 1` prefilled.

        Yields, chunk by chunk, log-probs of the whole vocabulary as (logits below each row's
        largest [B, T, V], their logsumexp [B, T]) and for each row the positions whose token the
        first columns predict.
        """
        contexts = [sequence[:-1] for sequence in sequences]
        begins = [start - 1 for start in starts]
        per_row = _SCORE_LOGITS // (len(sequences) * self.vocab_size)
        chunk = max(16, min(PREFILL_CHUNK // 2, per_row))
        for number, (ids_BT, positions_BT) in enumerate(self._chunks(contexts, begins, chunk)):
            length = int(positions_BT.max()) + 1
            logits_BTV = self.forward(
                cache, first_row, ids_BT, positions_BT, length, logits_to_keep=0
            )
            below_BTV, norms_BT = normalise(logits_BTV.float())
            predicted = [
                range(
                    min(start + number * chunk, len(sequence)),
                    min(start + (number + 1) * chunk, len(sequence)),
                )
                for sequence, start in zip(sequences, starts, strict=True)
            ]
            yield below_BTV, norms_BT, predicted

    def padded_length(self, sequences: list[list[int]], starts: list[int]) -> int:
        """Positions that `prefill` or `score` of these may write: padding goes beyond the end."""
        rest = max(len(ids) - start for ids, start in zip(sequences, starts, strict=True))
        return max(starts) + rest

    def _chunks(
        self, sequences: list[list[int]], starts: list[int], chunk: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and positions [B, T] of the part after `starts`, padded at the right with id 0."""
        rests = [ids[start:] for ids, start in zip(sequences, starts, strict=True)]
        longest = max(map(len, rests))
        starts_B1 = torch.tensor(starts, device=self.device)[:, None]
        for begin in range(0, longest, chunk):
            size = min(chunk, longest - begin)
            parts = [rest[begin : begin + size] for rest in rests]
            padded = [part + [0] * (size - len(part)) for part in parts]
            positions_BT = starts_B1 + torch.arange(begin, begin + size, device=self.device)
            yield torch.tensor(padded, device=self.device), positions_BT
