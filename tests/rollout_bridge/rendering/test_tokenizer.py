"""The tokenizer read from its files is transformers' own, in every value that is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.fingerprint import _tokenizer as described
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.rendering.tokenizer import ChatTokenizer, load_tokenizer
from tests.examples.shipped import MODEL
from tests.rollout_bridge.chat_tokenizers import write_tokenizer
from tests.rollout_bridge.family_tokenizers import EVERYTHING, FAMILIES, write_family

TEXTS = [
    *(
        "",
        "a",
        " a",
        "a ",
        "Hello, world!",
        "  two  spaces\n\n",
        "日本 émoji 🙂\u200d",
        "\t\r\n \n",
    ),
    *(
        "<|im_end|>",
        "a <think>b</think> c",
        "<s>x</s>",
        "[INST] x [/INST]",
        "<｜User｜>",
        "e\u0301",
    ),
    *('{"a": [1, 2.5e3, null]}', "don't , stop .", "x" * 300, "\ufdd0", "\ud7ff\ue000", "½ ﬁ Å"),
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "S <b>&'\""}, {"role": "user", "content": "漢字 🙂"}],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"city": "Zürich <&>"}},
                }
            ],
        },
        {"role": "tool", "content": "21", "tool_call_id": "c"},
        {"role": "assistant", "content": "<think>\nA\n</think>\n\nIt is 21."},
        {"role": "user", "content": "Thanks"},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks — <there> & 'here'.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
# What templates do: dates, loops with breaks, generation marks, own functions, JSON with settings.
TEMPLATE = """
{%- set ns = namespace(first=true) %}{{ bos_token }}{% for m in messages %}
  {%- if m.role == 'system' %}{% continue %}{% endif %}
  {% if ns.first %}{{ strftime_now('%Y') }}{% set ns.first = false %}{% endif %}
    {%- generation %}[{{ m.role }}] {{ m.content | trim }}{% endgeneration %}
  {%- if m.thinking is defined %}({{ m.thinking }}){% endif %}
  {%- for c in m.tool_calls or [] %}{{ c.function.arguments | tojson(indent=2) }}{% endfor %}
  {%- if m.content is not string %}{{ raise_exception('text only') }}{% endif %}
{% endfor %}{{ tools | tojson }}{{ dict(a=1) | tojson(ensure_ascii=True) }}
{%- if add_generation_prompt %}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ image_token }}
{%- endif %}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    written = {name: write_family(root / name, family) for name, family in FAMILIES.items()}
    written["everything"] = write_family(root / "everything", EVERYTHING)
    for name in ("plain", "thinking"):
        written[name] = write_tokenizer(root / name, f"chat_template_{name}.jinja")
    written["lab"] = str(MODEL)
    written["settings"] = write_family(root / "settings", FAMILIES["gemma"])
    _with_settings(Path(written["settings"]))
    return written


def _with_settings(folder: Path) -> None:
    """Old forms: the template inside the settings, tokens that only these name."""
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {
        "chat_template": TEMPLATE,
        "additional_special_tokens": ["<start_of_turn>", "<|new|>"],
        "unk_token": "<unk>",
        "pad_token": {
            "__type": "AddedToken",
            "content": "<pad>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        },
        "image_token": "<image_soft_token>",
        "added_tokens_decoder": {"9000": {"content": "<later>", "special": False}},
    }
    path.write_text(json.dumps(settings), encoding="utf-8")


NAMES = [*FAMILIES, "everything", "plain", "thinking", "lab", "settings"]


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, folders: dict[str, str]) -> tuple[ChatTokenizer, Any]:
    folder = folders[request.param]
    ours = load_tokenizer(folder)
    assert isinstance(ours, ChatTokenizer)
    return ours, AutoTokenizer.from_pretrained(folder)


def test_ids_and_texts_are_the_same(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
        encoding = ours(text, add_special_tokens=False, return_offsets_mapping=True)
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoding["input_ids"] == expected["input_ids"]
        assert encoding["offset_mapping"] == expected["offset_mapping"]
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_every_value_is_the_same(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    for name in ("eos_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("name_or_path", "chat_template", "all_special_tokens", "special_tokens_map"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert {key: repr(token) for key, token in ours.added_tokens_decoder.items()} == {
        key: repr(token) for key, token in theirs.added_tokens_decoder.items()
    }
    texts = ["<|im_end|>", "</think>", "a", "no such token"]
    assert ours.convert_tokens_to_ids(texts) == theirs.convert_tokens_to_ids(texts)
    assert ours.convert_tokens_to_ids("nope") == theirs.convert_tokens_to_ids("nope")


def test_a_stored_name_of_a_renderer_stays_valid(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    assert described(ours) == described(theirs)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
def test_templates_give_the_same_text(
    both: tuple[ChatTokenizer, Any], tools: Any, prompt: bool
) -> None:
    ours, theirs = both
    if ours.chat_template is None:
        pytest.skip("a family without a template here")
    for messages in CONVERSATIONS:
        options = {"tools": tools, "add_generation_prompt": prompt, "enable_thinking": False}
        text = ours.apply_chat_template(messages, tokenize=False, **options)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
        ids = ours.apply_chat_template(messages, **options)
        assert ids == theirs.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content.__class__.__mro__ }}", "cannot render"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% if %}", "cannot render"),
    ],
)
def test_what_a_template_may_not_do_is_refused(
    folders: dict[str, str], template: str, message: str
) -> None:
    rendering = Rendering.load(folders["plain"], RendererConfig(name="default"))
    rendering.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        rendering.prompt_ids([{"role": "user", "content": "x"}])


def test_several_templates_are_chosen_by_tools(folders: dict[str, str], tmp_path: Path) -> None:
    folder = Path(write_family(tmp_path / "model", FAMILIES["phi"]))
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    path.write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_tokenizer(str(folder))
    messages = CONVERSATIONS[0]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False) == "with tools"


def test_broken_files_are_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from .*tokenizer\.json") as got:
        Rendering.load(str(tmp_path), RendererConfig(name="qwen3"))
    assert "\n" not in str(got.value)


def test_rendering_imports_neither_transformers_nor_torch() -> None:
    script = """
import sys
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
messages = [{"role": "user", "content": "Hi <|im_end|>"}]
for name in ("qwen3", "default"):
    rendering = Rendering.load(sys.argv[1], RendererConfig(name=name))
    ids = rendering.prompt_ids(messages)
    rendering.parse(ids)
    rendering.rendered_prompt(messages)
    rendering.decode(ids)
    rendering.extend(ids, ids[:3], messages)
print([name for name in ("torch", "transformers", "openai") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
