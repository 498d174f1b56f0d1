"""Tools of the Responses API as functions of chat completions, and back. Pure.

A namespace groups functions. The model is shown them by their full names, `namespace__function`;
the client's calls have the two apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError

from api_proxy.errors import ApiError, invalid, unsupported
from api_proxy.responses_api.schemas import FunctionTool

Namespaces: TypeAlias = Mapping[str, str]
"""Descriptions of namespaces, by their names."""
_JOINT = "__"


def chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions of chat completions. Raises ApiError 400 on tools that are not functions, and
    on ambiguous full names.

    `strict` is left out: it is not enforced, and everything here is shown to the model.
    """
    functions = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.get("type") != "namespace":
            functions.append(_function(tool, place, None))
            continue
        name, members = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(members, list):
            raise invalid(f"'{place}' needs a 'name' and 'tools'.", place)
        for position, member in enumerate(members):
            where = f"{place}.tools[{position}]"
            if not isinstance(member, dict):
                raise invalid(f"'{where}' must be an object.", where)
            functions.append(_function(member, where, name))
    _check_names(functions, tools)
    return functions


def namespaces_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The namespaces among `tools`."""
    return {
        tool["name"]: str(tool.get("description") or "")
        for tool in tools
        if tool.get("type") == "namespace"
    }


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    return name if namespace is None else f"{namespace}{_JOINT}{name}"


def split_name(name: str, namespaces: Collection[str]) -> tuple[str | None, str]:
    """Namespace and name of a function that the model calls `name`."""
    at = name.find(_JOINT) if namespaces else -1
    while at >= 0:
        if name[:at] in namespaces:
            return name[:at], name[at + len(_JOINT) :]
        at = name.find(_JOINT, at + 1)
    return None, name


def response_tools(
    tools: Iterable[Mapping[str, Any]], namespaces: Namespaces
) -> list[dict[str, Any]]:
    """Functions of chat completions as the tools that were sent; `strict` is False, because nothing
    is enforced here.
    """
    found: list[dict[str, Any]] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        namespace, name = split_name(tool["function"]["name"], namespaces)
        function = {"parameters": None, **tool["function"], "name": name, "strict": False}
        body = {"type": "function", **function}
        if namespace is None:
            found.append(body)
            continue
        if namespace not in groups:
            groups[namespace] = []
            found.append(
                {
                    "type": "namespace",
                    "name": namespace,
                    "description": namespaces[namespace],
                    "tools": groups[namespace],
                }
            )
        groups[namespace].append(body)
    return found


def _function(tool: dict[str, Any], place: str, namespace: str | None) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise unsupported(
            f"Tools of type {str(tool['type'])[:100]!r} are not supported, only functions are.",
            f"{place}.type",
        )
    try:
        function = FunctionTool.model_validate(tool).model_dump(exclude_none=True)
    except ValidationError as error:
        raise _worded(error, place) from None
    return {
        "type": "function",
        "function": {**function, "name": full_name(namespace, function["name"])},
    }


def _worded(error: ValidationError, place: str) -> ApiError:
    fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
    param = ".".join([place, *map(str, fault["loc"])])
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    return invalid(f"Invalid value for '{param}': {fault['msg']}.", param, code)


def _check_names(functions: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ApiError 400 unless every full name has one function, and its prefix tells its
    namespace.
    """
    namespaces = namespaces_of(tools)
    if not namespaces:
        return
    names = [function["function"]["name"] for function in functions]
    if len(set(names)) != len(names):
        raise invalid("Two functions of 'tools' have the same full name.", "tools")
    others = [tool["name"] for tool in tools if tool.get("type") != "namespace"]
    for name in [*others, *namespaces]:
        if split_name(name, namespaces)[0] is not None:
            raise invalid("A name in 'tools' begins like a namespace that it is not in.", "tools")
