"""Nothing of the product is there that no run, no command and no framework can reach."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.reachable import Definition, Product

ROOT = Path(__file__).parents[1]
PACKAGES = ("opd", "trainer", "api_proxy", "judge", "rollout_bridge", "records")
ENTRIES = ("opd.cli.app.main", "rollout_bridge.embedded.__main__", "rollout_bridge.embedded")
BY_PATH = ("trainer.slime.hooks", "rollout_bridge.slime.rollout")
"""slime loads their public functions and classes, and calls every public method of the latter."""
SCRIPTS = "records.migrations"
"""alembic runs these files by name."""

ALLOWED: dict[str, str] = {
    "records.reading.explaining.Explanation": "printed whole, as JSON",
    "api_proxy.pages.measured.HintVersion": "written whole into a reply",
    "api_proxy.pages.tokens.Signal": "shown by a template",
    "api_proxy.pages.training._Drawn": "shown by a template",
    "opd.evaluation.gap.Gap": "written whole into a report",
    "opd.evaluation.tasks.Check": "of PromptTask",
    "opd.evaluation.tasks.PromptTask": "for suites that people bring: docs/evaluation.md",
    "records.training.reconcile.ReconcileReport": "logged whole",
    "rollout_bridge.config.RendererConfig": "handed whole to the package `renderers`",
    "rollout_bridge.tracing._TurnIds": "asked by OpenTelemetry's SDK",
    "trainer.objectives.policy.m2po.M2poClip": "golden: moments beside the clip that a run takes",
    "trainer.calibration.calibrate.EngineNoise": "written whole into the run folder",
}
"""A definition, a class with its fields, or a module with all that it has; and why it stays."""


@pytest.fixture(scope="module")
def product() -> Product:
    return Product(ROOT, PACKAGES)


def entries(product: Product) -> list[str]:
    found = list(ENTRIES)
    for module in product.modules.values():
        if module.name in BY_PATH:
            public = [one for one in module.definitions.values() if not is_private(one)]
            found += [one.path for one in public]
        elif module.name.startswith(SCRIPTS):
            found += [module.name, *(one.path for one in module.definitions.values())]
    return found


def is_private(one: Definition) -> bool:
    return any(part.startswith("_") for part in one.name.split("."))


def unreachable(product: Product, found: list[str], allowed: dict[str, str]) -> list[str]:
    """What neither `found` nor what is allowed leads to; of a class the class alone."""
    kept = [
        one.path
        for one in product.definitions()
        if any(f"{one.path}.".startswith(f"{path}.") for path in allowed)
    ]
    live = product.reached([*found, *kept])
    dead = [one for one in product.definitions() if one.path not in live]
    names = {one.path for one in dead}
    return [
        f"{one.path} (line {one.line})"
        for one in dead
        if one.name != "__all__" and f"{one.module}.{one.owner}" not in names
    ]


def test_nothing_that_nobody_can_reach(product: Product) -> None:
    """Call it, delete it with the tests that test it alone, or say in ALLOWED why it stays."""
    assert unreachable(product, entries(product), ALLOWED) == []


def test_every_allowance_is_needed(product: Product) -> None:
    live = product.reached(entries(product))
    for path in ALLOWED:
        below = [one.path for one in product.definitions() if f"{one.path}.".startswith(f"{path}.")]
        assert [one for one in below if one not in live], f"{path} is reached: take it out"


def test_every_module_is_imported(product: Product) -> None:
    live = product.reached(entries(product))
    assert set(product.modules) - live == set()


@pytest.fixture
def small(tmp_path: Path) -> Product:
    """A product with one of each thing that decides."""
    files = {
        "__init__": "",
        "app": """
            import enum
            import ast
            from pydantic import BaseModel, field_validator
            from small import used
            from small.used import helper as own

            class Kind(enum.Enum):
                ONE = 1

            class Message(BaseModel):
                sent: int

                @field_validator("sent")
                def _checked(cls, value):
                    return value

            class AppConfig(BaseModel):
                read: int
                never_read: int

            class Walk(ast.NodeVisitor):
                def visit(self, node):
                    return node

                def never_called(self):
                    return 1

            def main(config: AppConfig):
                dead = config.read
                return own(dead), used.again(), Kind, Message, Walk, late(), "small.named.hook"

            def late():
                from small import lazy
                return lazy.value

            def unused_by_name(dead):
                return dead
            """,
        "used": """
            def helper(value):
                return [dead for dead in value if dead.called]

            def again():
                return Parts().called

            class Parts:
                @property
                def called(self):
                    return _private()

                @property
                def not_called(self):
                    return _orphan()

            def _private():
                return 1

            def _orphan():
                return dead()

            def dead():
                return _orphan()
            """,
        "lazy": "value = 1\nother = 2\n",
        "named": "def hook(): ...\ndef other(): ...\n",
        "alone": "def nothing(): ...\n",
    }
    folder = tmp_path / "small"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(dedent(text))
    return Product(tmp_path, ["small"])


def test_what_a_small_product_reaches(small: Product) -> None:
    found = unreachable(small, ["small.app.main"], {})
    assert [line.split(" ")[0] for line in found] == [
        "small.alone.nothing",
        "small.app.AppConfig.never_read",
        "small.app.Walk.never_called",
        "small.app.unused_by_name",
        "small.lazy.other",
        "small.named.other",
        "small.used.Parts.not_called",
        "small.used._orphan",
        "small.used.dead",
    ]
    assert "small.alone" not in small.reached(["small.app.main"])


def test_what_is_allowed_keeps_what_it_uses(small: Product) -> None:
    found = unreachable(small, ["small.app.main"], {"small.used.dead": "for this test"})
    assert not [line for line in found if "_orphan" in line or "used.dead" in line]
