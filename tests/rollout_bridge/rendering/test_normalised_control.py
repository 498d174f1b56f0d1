"""Content that a tokenizer normalises into a control text stays text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.linear_time import growth
from tests.rollout_bridge.family_tokenizers import FAMILIES, write_family
from tests.rollout_bridge.rendering.test_control_tokens import conversation, structure

NORMALIZERS = {
    "NFKC": normalizers.NFKC(),
    "lower case": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "own": None,
}
WIDE = {chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)}


def normalising(folder: Path, family: str, normalizer: str) -> str:
    """The family's tokenizer, whose added tokens are searched for in normalised text."""
    name = write_family(folder, FAMILIES[family])
    file = folder / "tokenizer.json"
    if NORMALIZERS[normalizer] is not None:
        core = Tokenizer.from_file(str(file))
        core.normalizer = NORMALIZERS[normalizer]
        core.save(str(file))
    values = json.loads(file.read_text(encoding="utf-8"))
    for token in values["added_tokens"]:
        token["normalized"] = True
    file.write_text(json.dumps(values), encoding="utf-8")
    return name


CASES = [(family, way) for family in ("qwen", "deepseek", "phi") for way in NORMALIZERS]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def rendering(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Rendering:
    family, way = request.param
    folder = tmp_path_factory.mktemp("normalising") / "model"
    name = normalising(folder, family, way)
    return Rendering.load(name, RendererConfig(name=FAMILIES[family].renderer))


def disguises(text: str) -> list[str]:
    """Other texts that NFKC, lower case or NFC makes `text` of."""
    wide = "".join(WIDE.get(character, character) for character in text)
    kelvin = text.replace("K", "\u212a").replace("\u3008", "\u2329").replace("\u3009", "\u232a")
    return [wide, WIDE.get(text[0], text[0]) + text[1:], text.upper(), kelvin, text[:-1] + wide[-1]]


def test_no_disguised_control_text_becomes_a_control_token(rendering: Rendering) -> None:
    plain = structure(rendering, rendering.prompt_ids(*conversation("x")))
    texts = sorted(rendering.control_texts)[:40]
    messages, tools = conversation(" ".join(one for text in texts for one in disguises(text)))
    for ids in (
        rendering.prompt_ids(messages, tools),
        rendering.rendered_prompt(messages, tools).ids,
    ):
        assert structure(rendering, ids) == plain


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_disguised_parts_do_not_join(rendering: Rendering, data: st.DataObject) -> None:
    texts = sorted(rendering.control_texts)
    disguised = st.sampled_from(texts).flatmap(lambda text: st.sampled_from(disguises(text)))
    halves = st.builds(lambda text, cut: text[cut:], disguised, st.integers(0, 3))
    parts = data.draw(st.lists(st.one_of(disguised, halves, st.sampled_from([" ", "\n", "é"]))))
    messages = [{"role": "user", "content": f"y{''.join(parts)}"}]
    plain = rendering.prompt_ids([{"role": "user", "content": "y"}])
    ids = rendering.prompt_ids(messages)
    assert structure(rendering, ids) == structure(rendering, plain)


def test_many_disguised_texts_take_linear_time(rendering: Rendering) -> None:
    disguise = disguises(sorted(rendering.control_texts)[0])[0]

    def render(count: int) -> None:
        rendering.prompt_ids([{"role": "user", "content": f"{disguise} " * count}])

    assert growth(lambda: render(200), lambda: render(800), below=6.6) < 6.6
