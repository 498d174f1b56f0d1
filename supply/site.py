"""The documentation as a site: the pages of docs/, the README as the first one, and references
generated from the code.

    python -m supply.site build/docs      writes the pages that mkdocs.yml builds from

Links that leave docs/ become plain text, since the site has no sources.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from api_proxy.app import ROUTERS, TURN_ROUTES
from opd.cli.app import app
from opd.run.config import RunConfig
from records.hints.types import HintStatus
from records.lessons.names import LessonKind, LessonState
from records.names import TurnState, TurnType
from records.reading.drop_words import BLOCK_WORDS, DROP_WORDS, LESSON_WORDS, REJECTION_WORDS

ROOT = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_ROOT_PAGES |= {"CHANGELOG.md": "changelog.md"}


def write(to: Path) -> None:
    """Write all pages into the folder `to`, which is emptied first."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(ROOT / "docs", to)
    for page in to.glob("*.md"):
        page.write_text(inside(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, page in _ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        (to / page).write_text(from_root(text), encoding="utf-8")
    reference = to / "reference"
    reference.mkdir()
    pages = {
        "configuration": configuration(),
        "commands": commands(),
        "routes": routes(),
        "names": names(),
    }
    for name, text in pages.items():
        (reference / f"{name}.md").write_text(text, encoding="utf-8")


def inside(text: str) -> str:
    """A page of docs/ without links to files outside it."""
    return _OUTSIDE.sub(r"`\1`", text)


def from_root(text: str) -> str:
    """A page of the root, as if it were in docs/."""
    for name, page in _ROOT_PAGES.items():
        text = text.replace(f"]({name})", f"]({page})")
    text = text.replace("](docs/", "](")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#]*/[^)]*)\)", r"`\1`", text)


def configuration() -> str:
    """Every key of a run's configuration: its type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Every key of `RUN/config.toml`, as `--set key=value` takes it.",
    ]
    for title, model in sections(RunConfig):
        rows = list(_rows(model, title))
        if rows:
            head = ["| key | type | default | meaning |", "|---|---|---|---|"]
            lines += ["", f"## {title or 'the run'}", "", *_said(model), *head, *rows]
    return "\n".join(lines) + "\n"


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """A configuration and all sections in it, with the keys that lead there."""
    yield prefix, model
    for name, field in model.model_fields.items():
        found = list(models_of(field.annotation))
        for one in found:
            key = f"{prefix}.{name}" if prefix else name
            kind = one.model_fields.get("name")
            if len(found) > 1 and kind is not None:
                key = f'{key} (name = "{typing.get_args(kind.annotation)[0]}")'
            yield from sections(one, key)


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type: of an optional one, of a union, of a list."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        if not isinstance(argument, str | FieldInfo):
            yield from models_of(argument)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    texts = meanings(model)
    for name, field in model.model_fields.items():
        if any(True for _ in models_of(field.annotation)):
            continue
        section = prefix.split(" ", 1)[0]
        key = f"{section}.{name}" if section else name
        meaning = _cell(texts.get(name, ""))
        cells = (f"`{key}`", f"`{_type(field.annotation)}`", _default(field), meaning)
        yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """A text in a table: outside of code, characters that would begin a tag or end the cell are
    escaped.
    """
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("|", "&#124;") for part in parts[::2]]
    return "`".join(parts)


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The texts under the fields of a model, including those of its bases."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not issubclass(one, BaseModel) or one is BaseModel:
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in itertools.pairwise(body.body):
            text = _text(below)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and text:
                found[field.target.id] = text
    return found


def _text(statement: ast.stmt) -> str | None:
    """The text of a bare string, on one line; None for another statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return None


def _type(annotation: Any) -> str:
    if annotation is type(None):
        return "none"
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " or ".join(repr(one) for one in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one) for one in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type(one) for one in arguments)}]"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "unset" if value is None else f"`{value!r}`"


def _said(model: type[BaseModel]) -> list[str]:
    text = inspect.getdoc(model)
    return [text, ""] if text else []


def commands() -> str:
    """The help of every command."""
    lines = ["# Commands", "", "`./run.sh COMMAND` runs `opd COMMAND` in the environment it makes."]
    for words, command in leaves(typer.main.get_command(app), ("opd",)):
        context = command.make_context(" ".join(words), [], resilient_parsing=True)
        lines += ["", f"## {' '.join(words)}", "", "```text", command.get_help(context), "```"]
    return "\n".join(lines) + "\n"


def leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands that do something, with their words."""
    below = getattr(command, "commands", None)
    if not below:
        yield words, command
        return
    for name, one in sorted(below.items()):
        if not one.hidden:
            yield from leaves(one, (*words, name))


def routes() -> str:
    """Every route of the endpoint, and what it does."""
    lines = [
        "# Routes",
        "",
        "What the endpoint answers. A page's JSON has the same permissions as the page.",
        "",
        "| method | path | |",
        "|---|---|---|",
        *(_route("POST", path, endpoint) for path, endpoint in TURN_ROUTES),
    ]
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute), route
            lines += [
                _route(one, route.path, route.endpoint) for one in sorted(route.methods or ())
            ]
    return "\n".join(lines) + "\n"


def _route(method: str, path: str, endpoint: Any) -> str:
    first, _, _ = (inspect.getdoc(endpoint) or "").partition("\n\n")
    return f"| {method} | `{path}` | {_cell(' '.join(first.split()))} |"


_KINDS: tuple[tuple[type[StrEnum], str], ...] = (
    (TurnType, "Kinds of turns"),
    (TurnState, "States of a turn"),
    (HintStatus, "States of a hint"),
    (LessonKind, "Kinds of lessons"),
    (LessonState, "States of a lesson"),
)
_REASONS: tuple[tuple[Mapping[Any, str], str], ...] = (
    (DROP_WORDS, "Why a turn does not train"),
    (REJECTION_WORDS, "Why a vote's hint was refused"),
    (BLOCK_WORDS, "Why a hint is not practised"),
    (LESSON_WORDS, "Why a lesson does not train"),
)


def names() -> str:
    """The closed sets of names: kinds and states of turns, hints and lessons, and all reasons."""
    lines = ["# Names", ""]
    for kind, title in _KINDS:
        lines += [f"## {title}", "", inspect.getdoc(kind) or "", "", *_listed(kind), ""]
    for words, title in _REASONS:
        lines += [f"## {title}", "", "| reason | means |", "|---|---|"]
        lines += [f"| `{reason}` | {_cell(said)} |" for reason, said in words.items()] + [""]
    return "\n".join(lines)


def _listed(kind: type[StrEnum]) -> list[str]:
    return [f"- `{one.value}`" for one in kind]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
