"""Perplexity of a model on English text: the help topics of the Python interpreter."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

CHUNK = 512
CHUNKS = 24


def perplexity(model: Path) -> float:
    """exp of the mean negative log-prob per token, over CHUNKS pieces of CHUNK tokens, each read
    from its start; computed in float32.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0][: CHUNK * CHUNKS]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for chunk in ids.split(CHUNK):
            logits = network(chunk[None]).logits[0, :-1]
            total += functional.cross_entropy(logits, chunk[1:], reduction="sum").item()
            count += len(chunk) - 1
    return math.exp(total / count)
