"""One set of ids that end a reply, whatever the renderer: nothing of them reaches the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.engine import Engine
from rollout_bridge.rendering.renderer_package import prepare
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.rendering.stop_ids import model_stop_ids
from rollout_bridge.rendering.tokenizer import load_tokenizer
from tests.contract import tiny_model
from tests.rollout_bridge.family_tokenizers import EVERYTHING, FAMILIES, write_family

prepare()
ENDS = {
    "qwen": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "phi": "<|end|>",
}
"""Of the families with a template of their own: what it writes after a reply."""


def renderer_names() -> list[str]:
    from renderers.configs import RendererConfig as PackageConfig

    (union, *_) = get_args(PackageConfig)
    known = [variant.model_fields["name"].default for variant in get_args(union)]
    return [name for name in known if name not in ("auto", "custom")]


def with_another_eos(folder: Path, eos: str, **generation: object) -> str:
    """The model's tokenizer names another token than the one that ends its turns."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": eos}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def token_id(folder: str, text: str) -> int:
    return load_tokenizer(folder).convert_tokens_to_ids(text)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer that ends texts with one token, while the model's turns end with another."""
    folder = tmp_path_factory.mktemp("stops") / "model"
    write_family(folder, EVERYTHING)
    end = token_id(str(folder), "<end_of_turn>")
    return with_another_eos(folder, "<eos>", eos_token_id=[end])


@pytest.mark.parametrize("name", renderer_names())
def test_every_renderer_ends_where_the_model_ends(everything: str, name: str) -> None:
    if name == "gpt-oss":
        pytest.skip("its encoder fetches a vocabulary from the network")
    rendering = Rendering.load(everything, RendererConfig(name=name))
    end = token_id(everything, "<end_of_turn>")
    assert {end, token_id(everything, "<eos>")} <= set(rendering.stop_token_ids)
    said = rendering.tokenizer.encode("Hello", add_special_tokens=False)
    plain = rendering.parse(np.asarray(said, dtype=np.int32))
    for stop in rendering.stop_token_ids:
        ended = rendering.parse(np.asarray([*said, stop], dtype=np.int32))
        assert ended.content == plain.content
        assert ended.tool_calls == plain.tool_calls == []


@pytest.mark.parametrize("family", ENDS)
def test_the_template_tells_the_end_of_a_turn(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path / "model", FAMILIES[family])
    eos = FAMILIES[family].special[0]
    # transformers writes such a file for every model that it saves.
    folder = with_another_eos(
        Path(folder), eos, eos_token_id=token_id(folder, eos), _from_model_config=True
    )
    wanted = {token_id(folder, eos), token_id(folder, ENDS[family])}
    assert set(model_stop_ids(folder, load_tokenizer(folder))) == wanted
    rendering = Rendering.load(folder, RendererConfig(name="default"))
    assert set(rendering.stop_token_ids) == wanted


def test_a_reply_that_comes_back_ends_once(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", FAMILIES["gemma"])
    folder = with_another_eos(Path(folder), "<eos>")
    rendering = Rendering.load(folder, RendererConfig(name="default"))
    user = {"role": "user", "content": "How warm?"}
    said = rendering.tokenizer.encode("21", add_special_tokens=False)
    end = token_id(folder, "<end_of_turn>")
    reply = rendering.parse(np.asarray([*said, end], dtype=np.int32))
    assert reply.content.strip() == "21"
    assistant = {"role": "assistant", "content": reply.content}
    text = rendering.decode(rendering.prompt_ids([user, assistant, user]))
    assert text.count("<end_of_turn>") == 3
    recorded = rendering.recorded_response_ids([user], assistant)
    assert recorded[-1] == end


def test_an_end_beyond_the_vocabulary_is_none(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", FAMILIES["gemma"])
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 999999}')
    assert set(model_stop_ids(folder, load_tokenizer(folder))) == {
        token_id(folder, "<end_of_turn>")
    }


def test_the_engine_has_the_renderer_s_ends(tmp_path: Path) -> None:
    model = tiny_model.build(tmp_path / "model", 0)
    ends = [token_id(str(model), text) for text in ("<|endoftext|>", "<|im_end|>")]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    engine = Engine(EmbeddedEngineConfig(model=str(model)))
    rendering = Rendering.load(str(model), RendererConfig(name="default"))
    assert engine.stop_token_ids == frozenset(rendering.stop_token_ids) == frozenset(ends)
