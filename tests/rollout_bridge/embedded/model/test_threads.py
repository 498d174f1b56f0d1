"""Small models get one thread, others the machine's cores, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_bridge.embedded.model.threads import allowed_cores, set_threads

CHOSEN_BY_TORCH = 3


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(CHOSEN_BY_TORCH)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("hidden_size", "asked", "expected"),
    [(128, None, 1), (128, 2, 2), (576, None, CHOSEN_BY_TORCH), (576, 1, 1)],
)
def test_threads(hidden_size: int, asked: int | None, expected: int) -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    set_threads(asked, LlamaForCausalLM(config))
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("250000 100000\n", 3), ("1000 100000\n", 1), ("", None)],
)
def test_what_a_container_may_use(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert allowed_cores(tmp_path / "cpu.max") == cores
    assert allowed_cores(tmp_path / "missing") is None
