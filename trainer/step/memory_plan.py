"""`trainer.memory_gb`: how many tokens a pass with gradients may have, measured at the start.

Two passes of different lengths show what a token costs. The process's peak comes from the kernel on
a CPU, from the allocator on a GPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from records.types import ReadySample
from trainer.config import TrainerConfig
from trainer.errors import StartupError
from trainer.model.heap import give_back
from trainer.model.policy import Policy

logger = logging.getLogger(__name__)

GB = 1e9
LEAST_TOKENS = 256
"""Training does not start if fewer tokens than this fit into a pass."""
MARGIN = 1.15
"""A step holds more than a pass: supports, statistics, the scores of the reference."""
_ADAM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes in use before a pass, taken by any pass, and taken by each of its tokens; `limit`
    bounds their sum.
    """

    resident: float
    fixed: float
    per_token: float
    limit: float

    @property
    def longest(self) -> int:
        """Most tokens of a pass. Raises StartupError if not even a short one fits."""
        room = self.limit - self.resident - self.fixed
        tokens = int(room / (MARGIN * self.per_token))
        if tokens < LEAST_TOKENS:
            needed = self.resident + self.fixed + MARGIN * self.per_token * LEAST_TOKENS
            raise StartupError(
                f"trainer.memory_gb = {self.limit / GB:g} is too little to train this model: "
                f"{LEAST_TOKENS} tokens take {needed / GB:.2f} GB, and each 1,000 more "
                f"{1000 * MARGIN * self.per_token / GB:.2f} GB; raise it, or train adapters "
                "(trainer.lora.rank=8)"
            )
        return tokens


def fitting(config: TrainerConfig, policy: Policy) -> tuple[TrainerConfig, int | None]:
    """The configuration with micro-batches that fit into `trainer.memory_gb`, and the most tokens
    of a sequence; unchanged, and None, if that is not set.

    Raises StartupError if nothing fits, or the system does not report memory use.
    """
    if config.memory_gb is None:
        return config, None
    plan = measure(policy, config.memory_gb * GB)
    longest = plan.longest
    logger.info(
        "memory: %.2f GB before a step, %.2f GB for each 1,000 tokens: at most %d tokens in a "
        "pass (trainer.memory_gb = %g)",
        (plan.resident + plan.fixed) / GB,
        1000 * plan.per_token / GB,
        longest,
        config.memory_gb,
    )
    micro_batch_tokens = min(config.micro_batch_tokens, longest)
    return config.model_copy(update={"micro_batch_tokens": micro_batch_tokens}), longest


def is_beyond(sample: ReadySample, longest: int | None) -> bool:
    """Whether a pass on this sample, with or without a hint, holds more tokens than fit."""
    prompts = [sample.prompt_ids, *(one.hinted_prompt_ids for one in sample.teachings)]
    length = max(map(len, prompts)) + len(sample.response_ids)
    if longest is None or length <= longest:
        return False
    logger.warning(
        "turn %s has %d tokens, but trainer.memory_gb allows %d: it is dropped; raise "
        "trainer.memory_gb, or keep contexts shorter",
        *(sample.turn_id, length, longest),
    )
    return True


def measure(policy: Policy, limit: float) -> MemoryPlan:
    """What passes of `policy` cost; it leaves no gradient behind."""
    gauge = _cuda_gauge(policy.device) if policy.device.type == "cuda" else _process_gauge
    lengths = _lengths(policy)
    _pass(policy, lengths[0])  # libraries load code on the first one
    peaks, used = [], 0.0
    for length in lengths:
        give_back()
        used, peak = gauge(lambda length=length: _pass(policy, length))
        peaks.append(peak - used)
    give_back()
    measured = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
    per_token = max(measured, _kept_bytes(policy))
    trained = sum(parameter.numel() for parameter in policy.trainable_parameters())
    return MemoryPlan(
        resident=used + _ADAM_BYTES * trained,
        fixed=max(peaks[0] - per_token * lengths[0], 0.0),
        per_token=per_token,
        limit=limit,
    )


def _lengths(policy: Policy) -> tuple[int, int]:
    """Tokens of the two passes: so many that the states of the first are mapped by themselves
    (heap.py), and what is measured is what is used.
    """
    width = policy.base_model.config.get_text_config().hidden_size
    first = min(max(2**20 // (4 * width) + 1, LEAST_TOKENS), 2048)
    return first, 2 * first


def _kept_bytes(policy: Policy) -> float:
    """Least bytes per token: the inputs of all layers. Passes of a small model use memory that is
    already free in the process.
    """
    text = policy.base_model.config.get_text_config()
    return 4.0 * text.hidden_size * text.num_hidden_layers


def _pass(policy: Policy, length: int) -> None:
    ids_BT = torch.arange(length, device=policy.device).remainder(policy.vocab_size).unsqueeze(0)
    mask_BT = torch.ones(ids_BT.shape, device=policy.device)
    mask_BT[:, 0] = 0
    policy.token_logprobs(ids_BT, mask_BT).logprobs_BT.sum().backward()
    for parameter in policy.trainable_parameters():
        parameter.grad = None


def _process_gauge(work: Callable[[], None]) -> tuple[float, float]:
    """(before, largest) resident bytes of this process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        work()
        return before, _status("VmHWM")
    except OSError as error:
        raise StartupError(
            f"trainer.memory_gb: this system does not report memory use ({error}); unset it "
            "and set trainer.micro_batch_tokens"
        ) from None


def _status(key: str) -> float:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"no {key} in /proc/self/status")
    return 1024.0 * int(found[1])


def _cuda_gauge(device: torch.device) -> Callable[[Callable[[], None]], tuple[float, float]]:
    def gauge(work: Callable[[], None]) -> tuple[float, float]:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return float(before), float(torch.cuda.max_memory_allocated(device))

    return gauge
