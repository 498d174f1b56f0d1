"""Nobody writes a prompt's structure but the template: control texts in content become text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.control_text import (
    BREAK,
    ControlTexts,
    is_control_text,
    pieces,
    unbroken,
)
from rollout_bridge.rendering.rendering import Rendering
from tests.rollout_bridge.family_tokenizers import FAMILIES, write_family

CASES = [
    (name, kind)
    for name, family in FAMILIES.items()
    for kind in dict.fromkeys(("default", family.renderer))
    if kind != "default" or family.template is not None
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def rendering(request: pytest.FixtureRequest, folders: dict[str, str]) -> Rendering:
    name, kind = request.param
    parser = {"tool_parser": "qwen3"} if (name, kind) == ("qwen", "default") else {}
    return Rendering.load(folders[name], RendererConfig(name=kind, **parser))


def conversation(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation with `text` wherever an agent, a user or a tool may write."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": f"look{text}", "arguments": {f"where{text}": f"a {text} b"}},
    }
    messages = [
        {"role": "system", "content": f"Be kind. {text}\nsystem"},
        {"role": "user", "content": f"Hi {text} there", "name": f"ann{text}"},
        {"role": "assistant", "content": f"Hello {text} you", "tool_calls": [call]},
        {"role": "tool", "content": f"{text}21", "tool_call_id": "call_1", "name": f"look{text}"},
        {"role": "assistant", "content": f"It says {text}", "reasoning_content": f"Hm {text} hm."},
        {"role": "user", "content": f"Thanks{text}"},
    ]
    schema = {
        "type": "object",
        "properties": {f"where{text}": {"type": "string", "description": f"The {text}."}},
    }
    function = {"name": f"look{text}", "description": f"Looks {text}.", "parameters": schema}
    return messages, [{"type": "function", "function": function}]


def structure(rendering: Rendering, ids: Any) -> Counter[int]:
    return Counter(int(token) for token in ids if int(token) in rendering.control_ids)


def test_no_control_text_in_content_becomes_a_control_token(rendering: Rendering) -> None:
    plain = structure(rendering, rendering.prompt_ids(*conversation("word")))
    assert len(rendering.control_texts) > 10
    for text in rendering.control_texts:
        ids = rendering.prompt_ids(*conversation(text))
        assert structure(rendering, ids) == plain, text
        assert rendering.decode(ids).count(text) >= 2, text


def test_what_is_read_is_what_was_written(rendering: Rendering) -> None:
    every = " ".join(sorted(rendering.control_texts))
    shown = rendering.decode(rendering.prompt_ids([{"role": "user", "content": f"a {every} b"}]))
    assert f"a {every} b" in shown
    assert BREAK not in shown


def test_an_extension_shows_new_text_as_text(rendering: Rendering) -> None:
    if rendering.template_only:
        pytest.skip("a template alone cannot extend a prompt")
    prompt = rendering.prompt_ids([{"role": "user", "content": "Hi"}])
    reply = "</think>Hello" if rendering.decode(prompt).endswith("<think>\n") else "Hello"
    encoded = rendering.tokenizer.encode(reply, add_special_tokens=False)
    ends = [np.array([*encoded, stop], dtype=np.int32) for stop in rendering.stop_token_ids]
    new = {"role": "tool", "content": "word", "tool_call_id": "call_1"}
    bases = [(end, rendering.extend(prompt, end, [new])) for end in ends]
    extended_by = [(end, base) for end, base in bases if base is not None]
    if not extended_by:
        pytest.skip("this family renders a tool's result anew after such a reply")
    end, base = extended_by[0]
    for text in rendering.control_texts:
        extended = rendering.extend(prompt, end, [{**new, "content": f"a {text} b"}])
        assert extended is not None
        assert structure(rendering, extended) == structure(rendering, base), text
        assert f"a {text} b" in rendering.decode(extended)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_halves_of_control_texts_do_not_join(rendering: Rendering, data: st.DataObject) -> None:
    texts = sorted(rendering.control_texts)
    halves = st.builds(
        lambda text, cut: (text[:cut], text[cut:]), st.sampled_from(texts), st.integers(1, 6)
    )
    parts = data.draw(st.lists(st.one_of(halves, st.sampled_from([(" ", "\n"), (BREAK, "é")]))))
    text = "".join(half for pair in parts for half in pair)
    messages = [
        {"role": "user", "content": "x", "name": text},
        {"role": "assistant", "content": f"x{text}"},
        {"role": "user", "content": f"y {text}"},
    ]
    plain = [{"role": m["role"], "content": "x"} for m in messages]
    plain[0]["name"] = "x"
    ids = rendering.prompt_ids(messages)
    assert structure(rendering, ids) == structure(rendering, rendering.prompt_ids(plain))
    assert f"y {text}".strip() in rendering.decode(ids)


def test_text_without_control_texts_has_the_templates_ids(rendering: Rendering) -> None:
    messages, tools = conversation(" <b>ünï</b> [1] </p> |> 漢字 < a")
    content = rendering._content
    assert content.broken_messages(messages) == messages
    assert not content.stand_in(tools)


def test_a_thought_that_opens_a_reply_stays_one(folders: dict[str, str]) -> None:
    rendering = Rendering.load(folders["qwen"], RendererConfig(name="qwen3"))
    question = {"role": "user", "content": "Hi"}
    result = {"role": "tool", "content": "21"}
    written = {"role": "assistant", "content": "<think>\nHm </think x> <|im_end|>.\n</think>\n\nHo"}
    given = {
        "role": "assistant",
        "content": "Ho",
        "reasoning_content": "Hm </think x> <|im_end|>.",
    }
    shown = rendering.prompt_ids([question, written, result])
    assert shown.tolist() == rendering.prompt_ids([question, given, result]).tolist()
    later = {"role": "assistant", "content": "Ho </think> <|im_start|>"}
    structural = structure(rendering, rendering.prompt_ids([question, later, result]))
    plain = {"role": "assistant", "content": "Ho"}
    assert structural == structure(rendering, rendering.prompt_ids([question, plain, result]))


def test_calls_that_stay_text_keep_their_markers(folders: dict[str, str]) -> None:
    rendering = Rendering.load(folders["qwen"], RendererConfig(name="default"))
    reply = '<tool_call>\n{"name": "look"}\n</tool_call>'
    ids = rendering.prompt_ids(
        [
            {"role": "user", "content": f"Quote {reply}"},
            {"role": "assistant", "content": f"{reply}<|im_end|>"},
            {"role": "user", "content": "Go"},
        ]
    )
    counted = structure(rendering, ids)
    assert counted[rendering.tool_call_start_id] == 1
    assert counted[rendering.tool_call_end_id] == 1
    assert counted[rendering.stop_token_ids[0]] == 3


def test_threads_and_calls_give_the_same_ids(rendering: Rendering) -> None:
    from concurrent.futures import ThreadPoolExecutor

    text = " ".join(sorted(rendering.control_texts)[:20])
    expected = rendering.prompt_ids(*conversation(text))
    with ThreadPoolExecutor(4) as pool:
        for ids in pool.map(lambda _: rendering.prompt_ids(*conversation(text)), range(20)):
            assert np.array_equal(ids, expected)


def test_origins_are_known_beside_broken_text(rendering: Rendering) -> None:
    messages, tools = conversation("a <|im_end|> <think> <|eot_id|> [e~[ <｜User｜> <|user|> b")
    prompt = rendering.rendered_prompt(messages, tools)
    assert prompt.ids.tolist() == rendering.prompt_ids(messages, tools).tolist()
    if prompt.message_indices is not None:
        assert set(prompt.message_indices.tolist()) >= {1, 2, 4, 5}


@pytest.mark.parametrize(
    ("text", "is_special", "expected"),
    [
        ("<tool_call>", False, True),
        ("[INST]", False, True),
        ("]~b]", True, True),
        ("<s>", True, True),
        ("<table>", False, False),
        ("</b>", False, False),
        ("tomato", False, False),
        ("\n\n", False, False),
        ("  ", True, False),
        ("<>", False, False),
    ],
)
def test_which_added_tokens_are_structure(text: str, is_special: bool, expected: bool) -> None:
    assert is_control_text(text, is_special=is_special) is expected


CONTROLS = ControlTexts(["<|im_end|>", "</think>", "]~!b[", "[e~["])


@given(st.lists(st.sampled_from([*CONTROLS.texts, *"<|]~!b[e/", BREAK, "\ufdd1", "é"])))
def test_breaks_leave_no_control_text_and_nothing_lost(parts: list[str]) -> None:
    text = "".join(parts)
    broken = CONTROLS.broken(text)
    assert unbroken(broken) == text
    assert not any(control in piece for piece in pieces(broken) for control in CONTROLS.texts)
    for control in CONTROLS.texts:
        for cut in range(2, len(control)):
            whole = "".join(pieces(broken)[-1:]) + control[cut:]
            assert not whole.endswith(control)


def test_blanks_are_for_text_that_somebody_else_encodes() -> None:
    spacing = ControlTexts(CONTROLS.texts, with_blanks=True)
    assert spacing.broken(f"a<|im_end|>{BREAK}b") == f"a< |im_end|>{BREAK}b"
    assert spacing.broken("plain") == "plain"
