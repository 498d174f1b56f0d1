"""Small tokenizers with the real control tokens of model families, and templates like theirs."""

from __future__ import annotations

import json
from dataclasses import dataclass
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

from tests.rollout_bridge.chat_tokenizers import CORPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Control tokens of one family; `renderer` is the package's name for it."""

    renderer: str
    special: tuple[str, ...]
    eos: str
    unspecial: tuple[str, ...] = ()
    template: str | None = None
    is_sentencepiece: bool = False


def _chatml(start: str, end: str) -> str:
    return (
        "{%- if tools %}" + start + "system\n# Tools{% for tool in tools %}\n{{ tool | tojson }}"
        "{% endfor %}" + end + "\n{% endif %}"
        "{%- for m in messages %}" + start + "{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}" + end + "\n{% endfor %}"
        "{%- if add_generation_prompt %}" + start + "assistant\n{% endif %}"
    )


_QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_QWEN_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(247)),
)
_GEMMA = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>"),
)
_GEMMA_ADDED = (
    *("[multimodal]", "<image_soft_token>", *(f"<unused{number}>" for number in range(99))),
    *("<table>", "</table>", "<h1>", "</h1>", "<b>", "</b>", "<code>", "</code>"),
)
_MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *(f"<SPECIAL_{number}>" for number in range(20, 120)),
)
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
    *(f"<｜place▁holder▁no▁{number}｜>" for number in range(100)),
)
_DEEPSEEK_ADDED = (
    *("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|EOT|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>", "<think>", "</think>"),
)
_GLM = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    *("<|begin_of_transcription|>", "<|end_of_transcription|>", "<|code_prefix|>"),
    *("<|code_middle|>", "<|code_suffix|>", "/nothink"),
)
_GLM_ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_MINIMAX = (
    *("]!p~[", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>"),
    *("<filename>", "<gh_stars>", "]<]speech[>[", "]<]image[>[", "]<]video[>[", "]~b]", "]~!b["),
    *("[e~[", "]!d~[", "<function_call>", "<code_interpreter>", "]<]start of image[>["),
    *("]<]end of image[>[", "<empty_output>"),
)
_MINIMAX_ADDED = ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
_PHI = (
    *("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>", "<|tool|>"),
    *("<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>", "<|tag|>"),
)
_KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "[EOT]", "<|im_system|>", "<|im_middle|>", "[UNK]", "[PAD]"),
)
_KIMI_ADDED = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>"),
)

_GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else 'user' }}\n{% if loop.first and tools %}"
    "{{ tools | tojson }}\n{% endif %}{{ m.name }}{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ m.name }}{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_PHI_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if loop.first and tools %}<|tool|>"
    "{{ tools | tojson }}<|/tool|>{% endif %}{{ m.name }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}<|/tool_call|>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

FAMILIES: dict[str, Family] = {
    "qwen": Family(
        renderer="qwen3",
        special=_QWEN_SPECIAL,
        unspecial=_QWEN_ADDED,
        eos="<|im_end|>",
        template=_chatml("<|im_start|>", "<|im_end|>"),
    ),
    "llama": Family(renderer="llama-3", special=_LLAMA, eos="<|eot_id|>"),
    "gemma": Family(
        renderer="default",
        special=_GEMMA,
        unspecial=_GEMMA_ADDED,
        eos="<end_of_turn>",
        template=_GEMMA_TEMPLATE,
        is_sentencepiece=True,
    ),
    "mistral": Family(
        renderer="default",
        special=_MISTRAL,
        eos="</s>",
        template=_MISTRAL_TEMPLATE,
        is_sentencepiece=True,
    ),
    "deepseek": Family(
        renderer="deepseek-v3",
        special=_DEEPSEEK,
        unspecial=_DEEPSEEK_ADDED,
        eos="<｜end▁of▁sentence｜>",
    ),
    "glm": Family(renderer="glm-4.5", special=_GLM, unspecial=_GLM_ADDED, eos="<|endoftext|>"),
    "minimax": Family(
        renderer="minimax-m2", special=_MINIMAX, unspecial=_MINIMAX_ADDED, eos="[e~["
    ),
    "phi": Family(renderer="default", special=_PHI, eos="<|end|>", template=_PHI_TEMPLATE),
    "kimi": Family(renderer="kimi-k2", special=_KIMI, unspecial=_KIMI_ADDED, eos="<|im_end|>"),
}


EVERYTHING = Family(
    renderer="default",
    special=tuple(
        dict.fromkeys(
            (
                *(text for family in FAMILIES.values() for text in family.special),
                *(text for family in FAMILIES.values() for text in family.unspecial),
                *(
                    "<assistant>",
                    "</assistant>",
                    "<user>",
                    "<system>",
                    "<image>",
                    "<img>",
                    "</img>",
                ),
                *(
                    "<|turn>",
                    "<turn|>",
                    "<|channel>",
                    "<channel|>",
                    "<|tool>",
                    "<tool|>",
                    "<|think|>",
                ),
                *(
                    "<|tool_call>",
                    "<tool_call|>",
                    "<|tool_response>",
                    "<tool_response|>",
                    "<image|>",
                ),
                *("<|image>", "<|image|>", "<|audio_end|>", "<|content_audio_input|>"),
                *("<|content_image|>", "<|content_invoke_tool_json|>", "<|content_text|>"),
                *("<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
                *(
                    "<|content_thinking|>",
                    "<|content_xml|>",
                    "<|end_message|>",
                    "<|message_model|>",
                ),
                *("<|message_system|>", "<|message_tool|>", "<|message_user|>", "<|message|>"),
                *("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"),
                *("<|unused_200053|>", "<|unused_200054|>", "<｜latest_reminder｜>", "｜DSML｜"),
                *(
                    "<｜action｜>",
                    "<｜authority｜>",
                    "<｜domain｜>",
                    "<｜query｜>",
                    "<｜read_url｜>",
                ),
                *("<｜title｜>", "〈|EOS|〉", "<tool_result>", "</tool_result>"),
                *(
                    f"<｜{name}:opensource｜>"
                    for name in ["hy_Assistant", "hy_User", "hy_begin_of_sentence", "hy_eos"]
                ),
                *("<｜reasoning_mode:opensource｜>", "<tool_sep:opensource>"),
                *(
                    f"<{slash}{name}:opensource>"
                    for name in [
                        "arg_key",
                        "arg_value",
                        "think",
                        "tool_call",
                        "tool_calls",
                        "tool_response",
                    ]
                    for slash in ("", "/")
                ),
                *("<tool_responses:opensource>", "</tool_responses:opensource>"),
            )
        )
    ),
    eos="<|im_end|>",
    template=_chatml("<|im_start|>", "<|im_end|>"),
)
"""What every renderer of the package asks of a tokenizer."""


def write_family(folder: Path, family: Family) -> str:
    """The family's tokenizer as files in `folder`; returns the folder's path."""
    core = _sentencepiece() if family.is_sentencepiece else _byte_level()
    core.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in family.special]
    )
    core.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in family.unspecial]
    )
    folder.mkdir(parents=True)
    core.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": family.eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    if "<bos>" in family.special:
        settings["bos_token"] = "<bos>"
    if "<s>" in family.special:
        settings["bos_token"] = "<s>"
    settings["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if family.template is not None:
        (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    return str(folder)


def _byte_level() -> Tokenizer:
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
    return core


def _sentencepiece() -> Tokenizer:
    """BPE as SentencePiece has it: a blank before each text, bytes for unknown characters."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator([word for text in CORPUS * 10 for word in text.split(" ")], trainer)
    # The bytes are in the vocabulary, and no texts to be searched for.
    return Tokenizer.from_str(json.dumps({**json.loads(core.to_str()), "added_tokens": []}))
