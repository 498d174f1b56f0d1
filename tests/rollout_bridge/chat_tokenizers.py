"""A small Qwen-style tokenizer written into a folder, with the chat template that a test needs."""

from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

DATA = Path(__file__).parent.parent / "data"

CORPUS = [
    "<|im_start|>system user assistant tool the quick brown fox jumps over the lazy dog",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    "# Tools You may call one or more functions to assist with the user query. signatures XML",
    "Hello, world! How are you today? I am fine, thank you. It is 21 degrees.\n\nGoodbye.",
    "[user's hint / instruction] Give temperatures in Celsius.",
]


def write_tokenizer(folder: Path, template: str | None) -> str:
    """Returns the folder's path; `template` names a file in tests/data, None: no chat template."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 10, trainer)
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    added = (
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    )
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    if template is not None:
        tokenizer.chat_template = (DATA / template).read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return str(folder)


def without_switches(folder: Path) -> Rendering:
    """A rendering under a chat template that has no switches."""
    name = write_tokenizer(folder, None)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Rendering.load(name, RendererConfig(name="default"))
