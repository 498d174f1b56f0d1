"""Who holds what while slime trains: tokens over context ranks, the vocabulary over tensor ranks,
rows over data ranks.

Hooks compute on whole responses and leave it to these functions to bring the parts together. Only
`MegatronRanks` knows slime and Megatron.

Shapes: T tokens of a row, R of its response, r those of them that this rank holds; N tokens,
V vocabulary, v the part of it that this rank holds.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """What the hooks ask of the other processes."""

    context_size: int
    is_first: bool
    """Whether this process reports for all."""

    def scoring_places(self, args: Any, batch: dict[str, Any], num_places: int) -> list[Tensor]:
        """For each row, which of this rank's `num_places` rows of logits score its tokens of the
        response: int64 [r], ascending, also from row to row.
        """
        ...

    def join(self, part: Tensor, total_length: int, response_length: int) -> Tensor:
        """[r, ...] of this context rank -> [R, ...], with gradient."""
        ...

    def part(self, whole: Tensor, total_length: int, response_length: int) -> Tensor:
        """[R, ...] -> [r, ...] of this context rank."""
        ...

    def of_all(self, own: Any) -> list[Any]:
        """What every data rank passed here; context ranks hold the same and count once."""
        ...

    def vocabulary_start(self, size: int) -> int:
        """The id of the first of this rank's `size` logits."""
        ...

    def vocabulary_sum(self, values: Tensor) -> Tensor:
        """The sum over tensor ranks; its gradient is every rank's own."""
        ...

    def vocabulary_max(self, values: Tensor) -> Tensor:
        """The maximum over tensor ranks, without gradient."""
        ...

    def vocabulary_parts(self, values: Tensor) -> list[Tensor]:
        """The tensors of all tensor ranks, without gradient."""
        ...


class MegatronRanks:
    """The process groups of Megatron, and slime's layout of tokens in them."""

    def __init__(self) -> None:
        # These modules exist only inside slime's trainer.
        from megatron.core import mpu  # pyright: ignore[reportMissingImports]
        from slime.backends.megatron_utils import (  # pyright: ignore[reportMissingImports]
            cp_utils,
            loss,
        )

        self._mpu: Any = mpu
        self._context: Any = cp_utils
        self._loss: Any = loss
        self.context_size: int = mpu.get_context_parallel_world_size()
        # The hooks run only on the last stage of a pipeline.
        self.is_first: bool = (
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0
            and mpu.get_tensor_model_parallel_rank() == 0
        )

    def scoring_places(self, args: Any, batch: dict[str, Any], num_places: int) -> list[Tensor]:
        """As `Ranks.scoring_places`."""
        device = batch["unconcat_tokens"][0].device
        # Numbers in place of logits: slime's own split shows where those of each row are.
        numbers = torch.arange(num_places, dtype=torch.float32, device=device)
        pairs = self._loss.get_responses(
            numbers.reshape(1, -1, 1),
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            apply_temperature=False,
        )
        return [places.squeeze(-1).long() for places, _ in pairs]

    def join(self, part: Tensor, total_length: int, response_length: int) -> Tensor:
        """As `Ranks.join`."""
        return self._context.all_gather_with_cp(part, total_length, response_length)

    def part(self, whole: Tensor, total_length: int, response_length: int) -> Tensor:
        """As `Ranks.part`."""
        return self._context.slice_log_prob_with_cp(whole, total_length, response_length)

    def of_all(self, own: Any) -> list[Any]:
        """As `Ranks.of_all`."""
        # The group that slime's own metrics are gathered in.
        group = self._mpu.get_data_parallel_group_gloo(with_context_parallel=True)
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        is_first = self._mpu.get_context_parallel_rank() == 0
        torch.distributed.all_gather_object(found, (is_first, own), group=group)
        return [one for counts, one in found if counts]

    def vocabulary_start(self, size: int) -> int:
        """As `Ranks.vocabulary_start`."""
        return self._mpu.get_tensor_model_parallel_rank() * size

    def vocabulary_sum(self, values: Tensor) -> Tensor:
        """As `Ranks.vocabulary_sum`."""
        summed = _Sum.apply(values, self._mpu.get_tensor_model_parallel_group())
        assert isinstance(summed, Tensor)
        return summed

    @torch.no_grad()
    def vocabulary_max(self, values: Tensor) -> Tensor:
        """As `Ranks.vocabulary_max`."""
        values = values.clone()
        group = self._mpu.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
        return values

    @torch.no_grad()
    def vocabulary_parts(self, values: Tensor) -> list[Tensor]:
        """As `Ranks.vocabulary_parts`."""
        group = self._mpu.get_tensor_model_parallel_group()
        parts = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, values.contiguous(), group=group)
        return parts


class _Sum(torch.autograd.Function):
    """Forward a sum over ranks, backward nothing: all ranks compute the same from the sum, and each
    has the gradient of its own summand.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        summed = values.clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
