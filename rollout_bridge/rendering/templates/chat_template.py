"""A model's chat template: messages and tools to the text of a prompt, as transformers renders it.

It has the same sandbox, switches and helpers, so the text is the same, but it does not import that
package. It knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def render_template(
    template: str, messages: Sequence[dict[str, Any]], tools: Any, **variables: Any
) -> str:
    """The text of `messages`; the template may also read `variables`.

    Raises jinja2.TemplateError if the template refuses the messages or is invalid.
    """
    shown = [_with_reasoning(message) for message in messages]
    return _compiled(template).render(messages=shown, tools=tools, **variables)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message without empty keys, its reasoning under each name that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING_FIELDS if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}`, which marks what the model says: in a prompt its body is unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` without attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` without underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in a template
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot store {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models are trained on it; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment.from_string(template)
