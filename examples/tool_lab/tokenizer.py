"""The lab model's tokenizer: a byte-level BPE of 768 tokens, trained on the words of the corpus.

The split pattern differs from Qwen's in one way that matters at this size: a capitalised word or a
digit never includes the space or quote before it. A name then has the same tokens wherever it
occurs, and can be copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.tool_lab.corpus import Row

VOCAB_SIZE = 768
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within XML tags: tools\n\n"
    "For each function call, return a json object with function name and arguments within "
    "XML tags:\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n'
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
SPLIT = (
    r"\p{Lu}[\p{L}_]*"  # a capitalised word alone
    r"|(?: ?[^\s\p{L}\p{N}])* ?\p{Ll}[\p{L}_]*"  # a word with the marks and the space before it
    r"|\p{N}"  # every digit alone
    r"|(?: ?[^\s\p{L}\p{N}])+"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s"
    r"|\p{L}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly VOCAB_SIZE tokens, with the chat template next to this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not "special": a decoder that skips special tokens must keep them, because they carry the tool
    # calls.
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ADDED_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    fast.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    if len(fast) != VOCAB_SIZE:
        raise ValueError(f"the corpus gave a vocabulary of {len(fast)}, wanted {VOCAB_SIZE}")
    return fast


def texts_for_tokenizer(rows: Iterable[Row]) -> Iterator[str]:
    """The texts that deserve merges: the rows' texts without names, and occasionally the constant
    prompts.
    """
    for number, row in enumerate(rows):
        if row.family == "copy":
            continue
        yield row.messages[number % len(row.messages)]["role"]
        if row.tools and number % 9 == 0:
            yield TOOLS_HEADER
            yield "\n".join(json.dumps(tool) for tool in row.tools)
        for message in row.messages:
            text = message["content"]
            if message["role"] == "system" and number % 5:
                continue
            if row.family == "judge" and message["role"] == "user" and number % 6:
                text = text[text.find("# Response") :]
            yield without_names(text)
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = without_names(function["arguments"])
                yield f'\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n'


_KEPT = re.compile(r"\b(in|for|at|of|Book|Reserve|First|Booked|hotel|city) [A-Z][a-z]{3,6}\b")
_QUOTED = re.compile(r'("(?:city|hotel|name)": )"[A-Z][a-z]{2,7}"')


def without_names(text: str) -> str:
    """`text` without the entity names: merges spent on random letters would be wasted."""
    return _QUOTED.sub(r'\1""', _KEPT.sub(r"\1 ", text))
