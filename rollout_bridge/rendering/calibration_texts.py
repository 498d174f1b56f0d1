"""The fixed sequences on which engines are compared with the trainer: conversations and random ids.

Conversations of several turns, with and without tool results, because positions far into a long
template are where engines have differed; random ids, because they visit the whole vocabulary.
"""

from __future__ import annotations

import contextlib

import numpy as np

from records.messages import Message
from records.types import Ids
from rollout_bridge.rendering.rendering import Rendering

CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Which planet is the largest?"},),
    (
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Name a prime number above 100."},
        {"role": "assistant", "content": "101."},
        {"role": "user", "content": "And the next one?"},
        {"role": "assistant", "content": "103."},
        {"role": "user", "content": "Thank you. Add them up, please."},
    ),
)
TOOL_CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "What is 17 times 23?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "multiply", "arguments": '{"a": 17, "b": 23}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "391"},
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    }
]


def calibration_sequences(
    rendering: Rendering, seed: int, vocab_size: int | None = None
) -> list[Ids]:
    """Id sequences of 2 tokens to a few hundred; equal seeds give equal sequences.

    Random ids are below `vocab_size`, the rows of the model's head, which a tokenizer may exceed.
    """
    num_ids = min(rendering.vocab_size, vocab_size or rendering.vocab_size)
    sequences = conversation_sequences(rendering)
    random = np.random.default_rng(seed)
    for length in (2, 33, 200):
        sequences.append(random.integers(0, num_ids, length).astype(np.int32))
    return sequences


def conversation_sequences(rendering: Rendering) -> list[Ids]:
    """The conversations in the model's own format.

    A template that refuses system messages gets its conversation without one, one that ignores
    tools gets only the calls, and one that cannot render those goes without that conversation: such
    models can be served too.
    """
    question, system, *exchange = (*CONVERSATIONS[0], *CONVERSATIONS[1])
    sequences = [rendering.prompt_ids([question])]
    for choices in (
        (([system, *exchange], []), (exchange, [])),
        ((list(TOOL_CONVERSATION), TOOLS), (list(TOOL_CONVERSATION), [])),
    ):
        for messages, tools in choices:
            with contextlib.suppress(ValueError):
                sequences.append(rendering.prompt_ids(messages, tools))
                break
    return sequences
