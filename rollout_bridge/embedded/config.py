"""Configuration of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_bridge.local_requests import is_loopback_host

CPU_ROWS_GIB, CPU_PREFIX_GIB = 1.0, 0.25


class EmbeddedEngineConfig(BaseModel):
    """One embedded engine. Importing this needs no torch."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Local folder or hub id of a causal language model; docs/models.md lists the families."""
    weight_version: str = "0"
    """Label of the weights loaded at start."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 lets the operating system choose; the port is reported when the engine is ready."""
    api_key_file: Path | None = None
    """File with the key that requests must send (`Authorization: Bearer`); unset: no key is needed,
    and only programs on this machine are answered. A run creates one for its own engines.
    """
    device: str = "cpu"
    """A torch device: "cpu", "cuda", "cuda:1"."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and computation; auto is float32 on a CPU and bfloat16 elsewhere."""
    rounds_start: bool = False
    """Round the weights of `model` to bfloat16 before computing with them in `dtype`, as a trainer
    does that keeps its frozen base in bfloat16. A run sets it for its own engines.
    """
    threads: int | None = Field(default=None, ge=1)
    """Threads that torch uses on a CPU; unset: one for a small model, else all cores."""
    max_batch: int = Field(default=64, ge=1)
    """Most requests decoded together."""
    context_length: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response together; unset: the model's own limit."""
    max_prefill_tokens: int = Field(default=8192, ge=64)
    """Most prompt tokens, padding included, computed between two decode steps; a longer prompt
    goes alone.
    """
    max_step_cost: int | None = Field(default=None, ge=1024)
    """Most of a prompt or a scored sequence that is computed between two decode steps, in tokens
    times the positions that they attend to. A longer one is computed in pieces of this size, one at
    a time, while others go on and shorter ones start. Unset: 2**19 on a CPU, 2**27 elsewhere.
    """
    max_grammar_bytes: int = Field(default=2**20, ge=1024)
    """Longer grammars (schemas, structural tags) are refused."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory for running requests; unset: 1 GiB on a CPU, 40% of the free memory elsewhere. A
    request always gets room for a whole context, however small this is. A long prompt or scored
    sequence that is computed in pieces takes its own length on top until it is done.
    """
    prefix_cache_gib: float | None = Field(default=None, ge=0)
    """Memory for reuse of prompt prefixes; unset: 0.25 GiB on a CPU, 15% of the free memory
    elsewhere; 0: none.
    """
    seed: int | None = None
    """Sampling seed for requests that send none; unset: from the operating system."""

    def cache_gib(self, *, on_gpu: bool) -> tuple[float | None, float | None]:
        """GiB for running requests and for prefixes; None: a share of what is free on the GPU."""
        rows, prefixes = (None, None) if on_gpu else (CPU_ROWS_GIB, CPU_PREFIX_GIB)
        return (
            rows if self.kv_cache_gib is None else self.kv_cache_gib,
            prefixes if self.prefix_cache_gib is None else self.prefix_cache_gib,
        )

    @model_validator(mode="after")
    def _others_need_a_key(self) -> EmbeddedEngineConfig:
        name = f"[{self.host}]" if ":" in self.host else self.host
        if self.api_key_file is None and not is_loopback_host(name):
            raise ValueError(
                f"others can reach host {self.host!r}: set api_key_file, or host = '127.0.0.1'"
            )
        return self


def spare_rows(agents: int, max_batch: int) -> int:
    """The number of running requests up to which spare ones start, `agents` of them agents': a
    quarter of all rows stays free, and with agents at work all others together take a quarter, so
    that each step stays short.
    """
    quarter = max_batch // 4
    return agents + quarter if agents else max_batch - quarter
