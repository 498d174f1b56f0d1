"""A tiny random model of the Qwen3 architecture with its own tokenizer, built on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "system user assistant tool the quick brown fox jumps over the lazy dog",
    "Hello, world! How are you today? I am fine, thank you.",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
)
CHAT_TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def build(folder: Path, seed: int, *, layers: int = 2, context_length: int = 512) -> Path:
    """Write model and tokenizer into `folder`; the same seed gives the same weights."""
    transformers_logging.disable_progress_bar()
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        # Large enough that probabilities differ clearly from one another.
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS] * 5, trainer)
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
