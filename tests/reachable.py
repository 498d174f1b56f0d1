"""What of the product a run can reach: definitions, who uses them, and the entry points.

A definition is a function, class or constant of a module, or a method, property or field of a
class. It is reached from an entry point by names: names of modules and what they import are
followed exactly, attributes of objects by their name alone. What is left over nobody can reach;
what is reached may still be dead, where another thing has its name.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy.orm import DeclarativeBase

# Decorators that wrap a function and register it nowhere.
_PLAIN_DECORATORS = (
    "abc.",
    "contextlib.",
    "dataclasses.",
    "functools.",
    "torch.",
    "typing.",
    "property",
    "staticmethod",
    "classmethod",
)
# All fields of such classes have a meaning: values by text, columns, what goes over the wire. Only
# of configuration (classes named so) somebody must read each.
_FIELDS_COUNT = (Enum, DeclarativeBase, BaseModel)
MAX_REEXPORTS = 10
_OWN_NAMES = (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
_GETATTR = {"getattr", "hasattr", "attrgetter", "setattr"}


@dataclass(slots=True)
class Definition:
    """A named thing: `module`, `name` (`Class.member` for members), and the code that it runs."""

    module: str
    name: str
    line: int
    code: list[ast.AST]
    owner: str | None = None
    decorators: list[str | None] = field(default_factory=list)
    """Dotted paths; None for other expressions."""

    @property
    def is_field(self) -> bool:
        """Whether it is an attribute of a class."""
        return self.owner is not None and isinstance(self.code[0], ast.Assign | ast.AnnAssign)

    @property
    def path(self) -> str:
        """`package.module.Class.member`."""
        return f"{self.module}.{self.name}"

    @property
    def member(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(slots=True)
class Module:
    """One file: its definitions by name, the names that it imports, its statements."""

    name: str
    package: str
    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, Definition] = field(default_factory=dict)
    statements: list[ast.AST] = field(default_factory=list)
    bases: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Uses:
    """What a piece of code refers to: dotted paths, and attributes of objects."""

    paths: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


class Product:
    """The modules of the product's packages under `root`, read and not imported."""

    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        self.modules: dict[str, Module] = {}
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                module = _read(path, root)
                self.modules[module.name] = module

    def definitions(self) -> Iterator[Definition]:
        """All of them."""
        for module in self.modules.values():
            yield from module.definitions.values()

    def reached(self, entries: Iterable[str], attributes: Iterable[str] = ()) -> set[str]:
        """Paths of definitions and modules that a run comes to from `entries`: dotted paths of
        modules and definitions. `attributes` are used by something that is not Python.
        """
        search = _Search(self, set(attributes))
        for entry in entries:
            search.reach(entry)
        search.run()
        return search.live

    def bases_of(self, module: Module, name: str) -> Iterator[tuple[str, str]]:
        """Names and dotted paths of all bases of a class, those of the product's bases too."""
        for path in module.bases.get(name, ()):
            yield path.rpartition(".")[2], path
            found = self.find(path)
            if found is not None and found.path != f"{module.name}.{name}":
                yield from self.bases_of(self.modules[found.module], found.name)

    def find(self, path: str) -> Definition | None:
        """The definition of a dotted path; None outside the product."""
        return self.resolve(path)[0]

    def resolve(self, path: str) -> tuple[Definition | None, list[str]]:
        """The definition of a dotted path, through re-exports, and the attributes after it."""
        for _ in range(MAX_REEXPORTS):
            module, name = self._split(path)
            if module is None or not name:
                break
            if name in module.definitions:
                return module.definitions[name], []
            head, *rest = name.split(".")
            if head in module.definitions:
                return module.definitions[head], rest
            if head not in module.imports:
                break
            path = ".".join([module.imports[head], *rest])
        return None, []

    def module_of(self, path: str) -> str | None:
        """The longest prefix that is a module."""
        module, _ = self._split(path)
        return None if module is None else module.name

    def _split(self, path: str) -> tuple[Module | None, str]:
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            module = self.modules.get(".".join(parts[:end]))
            if module is not None:
                return module, ".".join(parts[end:])
        return None, path


class _Search:
    """The fixed point: what is reached makes more reachable."""

    def __init__(self, product: Product, attributes: set[str]) -> None:
        self.product = product
        self.live: set[str] = set()
        self._attributes = attributes
        self._todo: list[tuple[Module, list[ast.AST]]] = []

    def reach(self, path: str) -> None:
        """A module, or a definition and the module that has it."""
        module_name = self.product.module_of(path)
        if module_name is None:
            return
        self._reach_module(module_name)
        found = self.product.find(path)
        if found is not None:
            self._reach_definition(found)

    def run(self) -> None:
        """Until nothing is added."""
        while True:
            while self._todo:
                module, code = self._todo.pop()
                self._follow(_uses(module, code))
            before = len(self.live)
            self._reach_members()
            if not self._todo and len(self.live) == before:
                return

    def _follow(self, uses: Uses) -> None:
        self._attributes |= uses.attributes
        for name in uses.modules:
            self.reach(name)
        for path in uses.paths:
            self.reach(path)
            self._attributes |= set(self.product.resolve(path)[1])

    def _reach_module(self, name: str) -> None:
        if name in self.live:
            return
        self.live.add(name)
        if "." in name:
            self._reach_module(name.rpartition(".")[0])
        module = self.product.modules[name]
        self._todo.append((module, module.statements))
        for target in module.imports.values():
            found = self.product.module_of(target)
            if found is not None:
                self._reach_module(found)
        for one in module.definitions.values():
            if one.owner is None and self._is_registered(one):
                self._reach_definition(one)

    def _reach_definition(self, one: Definition) -> None:
        if one.path in self.live:
            return
        self._reach_module(one.module)
        self.live.add(one.path)
        module = self.product.modules[one.module]
        self._todo.append((module, one.code))
        if one.owner is not None:
            self._reach_definition(module.definitions[one.owner])

    def _reach_members(self) -> None:
        for one in self.product.definitions():
            if one.owner is None or one.path in self.live:
                continue
            if f"{one.module}.{one.owner}" not in self.live:
                continue
            if one.member in self._attributes or self._by_framework(one):
                self._reach_definition(one)

    def _is_registered(self, one: Definition) -> bool:
        """Whether a decorator hands it to a framework: then it lives as soon as its owner does."""
        return any(self._registers(path) for path in one.decorators)

    def _registers(self, path: str | None) -> bool:
        if path is None:
            return True
        if path.startswith(_PLAIN_DECORATORS) or path.endswith((".setter", ".overload")):
            return False
        found = self.product.find(path)
        return found is None or not isinstance(found.code[0], ast.FunctionDef)

    def _by_framework(self, one: Definition) -> bool:
        if self._is_registered(one) or (one.member.startswith("__") and one.member.endswith("__")):
            return True
        module = self.product.modules[one.module]
        assert one.owner is not None
        names = {one.owner, *(name for name, _ in self.product.bases_of(module, one.owner))}
        is_configuration = any(name.endswith(("Config", "Options")) for name in names)
        return any(
            _knows(path, one, is_configuration=is_configuration)
            for _, path in self.product.bases_of(module, one.owner)
            if self.product.find(path) is None
        )


def _knows(base: str, one: Definition, *, is_configuration: bool) -> bool:
    """Whether a class outside the product calls this member of a class that is made of it: it has
    it too, or takes all fields of such a class (rows, messages, values of a set).
    """
    found = external(base)
    if not isinstance(found, type):
        return False
    if one.is_field and issubclass(found, _FIELDS_COUNT) and not is_configuration:
        return True
    return any(
        one.member in vars(parent) or one.member in getattr(parent, "__annotations__", {})
        for parent in found.__mro__
    )


@cache
def external(path: str) -> object | None:
    """What a dotted path outside the product names; None for what is not installed."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
            for name in parts[end:]:
                found = getattr(found, name)
        except (ImportError, AttributeError):
            continue
        return found
    return getattr(builtins, path, None)


def _read(path: Path, root: Path) -> Module:
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    parts = parts[:-1] if is_package else parts
    name = ".".join(parts)
    module = Module(name=name, package=name if is_package else ".".join(parts[:-1]))
    _read_body(ast.parse(path.read_text(encoding="utf-8")).body, module)
    return module


def _read_body(body: Iterable[ast.stmt], module: Module) -> None:
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports |= _imported(statement, module.package)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            _add(module, statement.name, statement, [statement], None)
        elif isinstance(statement, ast.ClassDef):
            _read_class(statement, module)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            names = _targets(statement)
            for one in names:
                _add(module, one, statement, [statement], None)
            if not names:
                module.statements.append(statement)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            _read_body(statement.body, module)
        elif isinstance(statement, ast.Try):
            _read_body([*statement.body, *statement.orelse, *statement.finalbody], module)
            for handler in statement.handlers:
                _read_body(handler.body, module)
        elif not _is_text(statement):
            module.statements.append(statement)


def _read_class(node: ast.ClassDef, module: Module) -> None:
    code: list[ast.AST] = [*node.bases, *node.keywords, *node.decorator_list]
    members: list[tuple[str, ast.stmt]] = []
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            members.append((statement.name, statement))
            code += statement.decorator_list
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            members += [(name, statement) for name in _targets(statement)]
            code.append(statement)
        elif not _is_text(statement):
            code.append(statement)
    _add(module, node.name, node, code, None)
    module.bases[node.name] = [path for base in node.bases if (path := _dotted(base, module))]
    for name, statement in members:
        _add(module, f"{node.name}.{name}", statement, [statement], node.name)


def _add(module: Module, name: str, node: ast.stmt, code: list[ast.AST], owner: str | None) -> None:
    decorators = [
        _dotted(one.func if isinstance(one, ast.Call) else one, module)
        for one in getattr(node, "decorator_list", [])
    ]
    known = module.definitions.get(name)
    if known is not None:
        # Overloads, setters, a name under two conditions.
        known.code += code
        known.decorators += decorators
        return
    module.definitions[name] = Definition(
        module.name, name, node.lineno, list(code), owner, decorators
    )


def _dotted(node: ast.AST, module: Module) -> str | None:
    """`a.b.c` with `a` as the module knows it; None for other expressions."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value, module)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, module)
        return None if base is None else f"{base}.{node.attr}"
    if isinstance(node, ast.Name):
        if node.id in module.imports:
            return module.imports[node.id]
        if node.id in module.definitions:
            return f"{module.name}.{node.id}"
        return node.id
    return None


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {
            one.asname or one.name.split(".")[0]: one.name if one.asname else one.name.split(".")[0]
            for one in node.names
        }
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
    return {one.asname or one.name: f"{base}.{one.name}" for one in node.names}


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    if isinstance(statement, ast.Assign):
        nodes = [name for target in statement.targets for name in ast.walk(target)]
    else:
        nodes = [statement.target]
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _uses(module: Module, code: Iterable[ast.AST]) -> Uses:
    visitor = _Visitor(module)
    for node in code:
        visitor.visit(node)
    return visitor.uses


class _Visitor(ast.NodeVisitor):
    """Names that a function binds itself are its own and mean nothing of the module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.uses = Uses()
        self._scopes: list[Mapping[str, str | None]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *_defaults(node.args), *_annotations(node)):
            self.visit(part)
        self._inside(_bound(node, self.module), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in _defaults(node.args):
            self.visit(part)
        self._inside(dict.fromkeys(_parameters(node.args)), [node.body])

    def _comprehension(self, node: ast.AST) -> None:
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        names = [
            one.id
            for generator in generators
            for one in ast.walk(generator.target)
            if isinstance(one, ast.Name)
        ]
        self.visit(generators[0].iter)
        self._inside(dict.fromkeys(names), list(ast.iter_child_nodes(node)))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _inside(self, names: Mapping[str, str | None], body: Iterable[ast.AST]) -> None:
        self._scopes.append(names)
        for node in body:
            self.visit(node)
        self._scopes.pop()

    def visit_Import(self, node: ast.Import) -> None:
        self.uses.modules |= {one.name for one in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for path in _imported(node, self.module.package).values():
            self.uses.modules.add(path.rpartition(".")[0])

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            path = self._path(node)
            if path is not None:
                self.uses.paths.add(path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None and isinstance(node.ctx, ast.Load):
            self.uses.paths.add(path)
            return
        if isinstance(node.ctx, ast.Load):
            self.uses.attributes.add(node.attr)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", None))
        if name in _GETATTR:
            self.uses.attributes |= {
                part
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                for part in argument.value.split(".")
            }
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "." in node.value and " " not in node.value:
            self.uses.paths.add(node.value)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.uses.attributes |= set(node.kwd_attrs)
        self.generic_visit(node)

    def _path(self, node: ast.AST) -> str | None:
        """The dotted path of a name of the module, or of attributes after one; else None."""
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        for scope in reversed(self._scopes):
            if node.id in scope:
                return scope[node.id]
        if node.id in self.module.imports:
            return self.module.imports[node.id]
        if node.id in self.module.definitions:
            return f"{self.module.name}.{node.id}"
        return None


def _bound(node: ast.FunctionDef | ast.AsyncFunctionDef, module: Module) -> dict[str, str | None]:
    """The names that a function binds, and what of them stands for an import."""
    names: dict[str, str | None] = dict.fromkeys(_parameters(node.args))
    todo: list[ast.AST] = list(node.body)
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Global | ast.Nonlocal):
            return {}
        if isinstance(one, ast.Import | ast.ImportFrom):
            names |= _imported(one, module.package)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[one.name] = None
            continue
        elif isinstance(
            one, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
        ):
            continue
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.setdefault(one.id, None)
        elif isinstance(one, ast.ExceptHandler) and one.name:
            names.setdefault(one.name, None)
        todo += ast.iter_child_nodes(one)
    return names


def _parameters(arguments: ast.arguments) -> list[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return [one.arg for one in every]


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)]


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    found = [one.annotation for one in every if one.annotation is not None]
    return [*found, *([node.returns] if node.returns is not None else [])]
