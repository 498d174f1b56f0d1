"""Imports the package `renderers` without its unused parts, and creates its renderers.

Its `__init__` imports OpenAI's client, which takes a second and 30 MB; its modules do without. The
package attributes each id to the text that it came from, in time that grows with ids times texts: a
minute for a request with many small tools. Prompts need only the ids, so the tokenizer that a
renderer gets here gives no offsets, a case that the package supports (`Tokenizer` in
`renderers.base`): the ids are the same. Some families tell from offsets which message an id belongs
to; they get offsets on request (`with_offsets`).
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, get_args

from pydantic import ValidationError

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.content_tokenizer import ContentTokenizer, OffsetTokenizer

# Chosen by the model or by a module's path, whereas this project's configuration names a renderer.
_NOT_NAMEABLE = {"auto", "custom"}
_CALL = ("<tool_call>", "</tool_call>")
PARSER_MARKS = {
    "qwen3": _CALL,
    "qwen3.5": _CALL,
    "glm": (*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek-v3": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
}
"""The tokens by which each of the package's parsers finds calls. Without them it finds none."""


def prepare() -> None:
    """Makes the package's modules importable; its `__init__` runs only if it already has."""
    if "renderers" in sys.modules:
        return
    spec = importlib.util.find_spec("renderers")
    assert spec is not None
    sys.modules["renderers"] = importlib.util.module_from_spec(spec)


def package_config(config: RendererConfig) -> Any:
    """The package's own typed configuration; raises ValueError naming what is wrong."""
    prepare()
    from renderers.configs import RendererConfig as PackageConfig

    (union, *_) = get_args(PackageConfig)
    by_name = {variant.model_fields["name"].default: variant for variant in get_args(union)}
    known = sorted(set(by_name) - _NOT_NAMEABLE)
    if config.name not in known:
        raise ValueError(f"unknown renderer {config.name!r}; known: {', '.join(known)}")
    given = config.model_dump(exclude={"name"}, exclude_none=True)
    try:
        return by_name[config.name](**given)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))} ({one['msg']})" for one in error.errors()]
        raise ValueError(
            f"renderer {config.name!r} does not take {', '.join(faults)}: leave it out, or name "
            "another renderer"
        ) from error


def check_tool_parser(tokenizer: Any, name: str | None) -> None:
    """Raises ValueError if there is no such parser of calls, or if it would find none in what this
    tokenizer decodes.
    """
    if name is None:
        return
    if name not in PARSER_MARKS:
        known = ", ".join(PARSER_MARKS)
        raise ValueError(f"tool_parser: unknown parser {name!r}; known: {known}")
    tokens = tokenizer.get_vocab()
    missing = next((mark for mark in PARSER_MARKS[name] if mark not in tokens), None)
    if missing is not None:
        raise ValueError(
            f"tool_parser: {name!r} finds calls by the token {missing}, which the model's "
            "tokenizer does not have: leave it out (calls stay text), or use a model that was "
            "trained on such calls"
        )


def make_renderer(tokenizer: Any, config: Any, *, with_offsets: bool = False) -> Any:
    """The configured renderer. Raises what its constructor raises for a tokenizer of another
    family.
    """
    prepare()
    from renderers.base import create_renderer

    kind = OffsetTokenizer if with_offsets else ContentTokenizer
    renderer = create_renderer(kind(tokenizer), config)
    _without_guessed_offsets(type(renderer))
    return renderer


def needs_offsets(renderer: Any) -> bool:
    """Whether it tells from offsets which message an id belongs to, or what was sampled."""
    if any(_guesses_offsets(base) for base in type(renderer).__mro__):
        return True
    rendered = renderer.render([{"role": "user", "content": "a"}])
    return len(rendered.sampled_mask) != len(rendered.token_ids)


def _guesses_offsets(kind: type) -> bool:
    return hasattr(sys.modules[kind.__module__], "_infer_offsets_from_decode")


def _without_guessed_offsets(kind: type) -> None:
    """Families that need offsets and get none guess them by decoding every prefix, which is
    quadratic. Told that there are none, they attribute roughly, and the ids are the same.
    """
    for base in kind.__mro__:
        if _guesses_offsets(base):
            vars(sys.modules[base.__module__])["_infer_offsets_from_decode"] = _unknown_offsets


def _unknown_offsets(*_: Any) -> None:
    return None
