"""Hypothesis strategies for what a JSON schema allows, and for what no schema would allow.

Reads the keywords that pydantic writes; an unknown one that bears on the value is an error, so that
a new kind of field is not passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from hypothesis import strategies as st

Schema: TypeAlias = dict[str, Any]
Values: TypeAlias = st.SearchStrategy[Any]
Referred: TypeAlias = Callable[[str, int], Values]
"""The values of a definition, by its name and by how many references may still be followed."""

_MAX_ITEMS = 4
_ODD_TEXTS = (
    "",
    "\0",
    "\ud800",
    "\u202e",
    "<|im_end|>",
    "</tool_call>",
    "{",
    "é" * 300,
    "x" * 5000,
)
_ODD_NUMBERS = (0, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 1e308, -0.0, 5e-324)
_DESCRIBING = {"title", "description", "default", "discriminator", "examples"}
_KNOWN = _DESCRIBING | {
    *("$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "enum", "type"),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "propertyNames"),
}

texts: Values = st.one_of(st.text(max_size=30), st.sampled_from(_ODD_TEXTS))
anything: Values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(_ODD_NUMBERS),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=_MAX_ITEMS), st.dictionaries(texts, below, max_size=_MAX_ITEMS)
    ),
    max_leaves=8,
)


_DEPTHS = (100, 2000, 100_000)
_NESTED = "lists in lists, depth "


def encoded(value: Any) -> bytes:
    """JSON; each mark of a depth becomes so many lists in each other, which no encoder writes."""
    data = json.dumps(value).encode()
    for depth in _DEPTHS:
        data = data.replace(f'"{_NESTED}{depth}"'.encode(), b"[" * depth + b"]" * depth)
    return data


def strategy(schema: Schema, depth: int = 4) -> Values:
    """Values that `schema` allows; below `depth` references in each other: anything."""
    definitions = schema.get("$defs", {})

    @cache
    def referred(name: str, depth: int) -> Values:
        # Each once: as many as there are paths to them would take longer than all requests.
        if depth == 0:
            return anything
        return st.deferred(lambda: _allowed(definitions[name], referred, depth - 1))

    return _allowed(schema, referred, depth)


def _allowed(schema: Schema, referred: Referred, depth: int) -> Values:
    unknown = set(schema) - _KNOWN
    if unknown:
        raise ValueError(f"keywords without a strategy: {', '.join(sorted(unknown))}")
    if "$ref" in schema:
        return referred(schema["$ref"].rpartition("/")[2], depth)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return st.one_of([_allowed(one, referred, depth) for one in schema[several]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return _of_type(schema, referred, depth)


def _of_type(schema: Schema, referred: Referred, depth: int) -> Values:
    match schema.get("type"):
        case "object":
            return _object(schema, referred, depth)
        case "array":
            least = schema.get("minItems", 0)
            most = min(schema.get("maxItems", _MAX_ITEMS), max(_MAX_ITEMS, least))
            return st.lists(
                _allowed(schema.get("items", {}), referred, depth), min_size=least, max_size=most
            )
        case "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", 10_000)
            return texts.filter(lambda text: least <= len(text) <= most)
        case "integer":
            return _integers(schema)
        case "number":
            low, high = schema.get("minimum", -10.0), schema.get("maximum", 10.0)
            low = schema.get("exclusiveMinimum", low)
            floats = st.floats(low, high, exclude_min="exclusiveMinimum" in schema)
            return st.one_of(floats, st.sampled_from([high]))
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case None:
            return anything
    raise ValueError(f"no strategy for {schema}")


def _integers(schema: Schema) -> Values:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + 1
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    near = st.integers(low if low is not None else -100, high if high is not None else 5000)
    return near if high is not None else st.one_of(near, st.integers(low, None))


def _object(schema: Schema, referred: Referred, depth: int) -> Values:
    properties = schema.get("properties")
    if properties is None:
        below = schema.get("additionalProperties")
        values = _allowed(below, referred, depth) if isinstance(below, dict) else anything
        return st.dictionaries(texts, values, max_size=_MAX_ITEMS)
    required = set(schema.get("required", ()))
    fields = {name: _allowed(below, referred, depth) for name, below in properties.items()}
    return st.fixed_dictionaries(
        {name: values for name, values in fields.items() if name in required},
        optional={name: values for name, values in fields.items() if name not in required},
    )


@st.composite
def spoiled(draw: st.DrawFn, values: Values) -> Any:
    """A value of the strategy in which one place holds something else."""
    value = draw(values)
    holder, key = None, None
    below = value
    while isinstance(below, dict | list) and below and draw(st.integers(0, 3)):
        keys = list(below) if isinstance(below, dict) else range(len(below))
        holder, key = below, draw(st.sampled_from(list(keys)))
        below = below[key]
    nested = st.sampled_from([f"{_NESTED}{depth}" for depth in _DEPTHS])
    odd = draw(st.one_of(anything, anything, nested))
    if holder is None:
        return odd
    holder[key] = odd
    return value
