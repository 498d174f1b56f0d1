"""What docs/objectives.md says of the configuration is so: every snippet, table and default."""

import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from judge.config import JudgeConfig
from opd.run.checks import check_run, run_warnings
from opd.run.config import TeacherGroup, merge, parse_overrides
from rollout_bridge.config import ScoringConfig
from rollout_bridge.engine.config import EngineClientConfig
from trainer.config import TeacherConfig, TrainerConfig
from trainer.objectives.frame import ABS_LOSS, expected_means
from trainer.objectives.names import AggregationMode
from trainer.objectives.options import OBJECTIVE_NAMES, HindsightOpd, ObjectiveOptions
from trainer.objectives.rollout_correction.config import PRESET_NAMES, preset
from trainer.objectives.rollout_correction.settings import health_warnings

PAGE = (Path(__file__).parents[1] / "docs" / "objectives.md").read_text(encoding="utf-8")
REFUSED = "What is refused, and why"
JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "judge"}
SETTING = re.compile(r"`((?:trainer|judge|scoring|engine_client)\.[a-z_.]+ = [^`]+)`")


def section(title: str) -> str:
    """The text under a heading up to the next of its level or above."""
    found = re.search(rf"^(##+) {re.escape(title)}$", PAGE, re.MULTILINE)
    assert found is not None, title
    level = len(found.group(1))
    text = PAGE[found.end() :]
    following = re.search(rf"^#{{2,{level}}} ", text, re.MULTILINE)
    return text[: following.start()] if following else text


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, heads included."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def settings(text: str) -> list[str]:
    """Per row of the tables, its settings as TOML; rows without any are left out."""
    found = ["\n".join(SETTING.findall(" ".join(row))) for row in rows(text)]
    return [one for one in found if one]


def build(values: dict[str, Any]) -> TrainerConfig:
    """The sections as a run reads them together; raises ValueError for what it would refuse."""
    trainer = TrainerConfig.model_validate(values.get("trainer", {}))
    judge = JudgeConfig.model_validate(JUDGE | values.get("judge", {}))
    EngineClientConfig.model_validate(values.get("engine_client", {}))
    for group in values.get("teachers", {}).values():
        TeacherGroup.model_validate(group)
    check_run(trainer, ScoringConfig.model_validate(values.get("scoring", {})), judge)
    return trainer


@pytest.mark.parametrize("block", blocks(PAGE, "toml"))
def test_every_block_is_a_configuration_without_warnings(block):
    assert block.startswith(("[trainer", "[scoring"))
    assert run_warnings(build(tomllib.loads(block))) == []


@pytest.mark.parametrize("text", settings(PAGE.replace(section(REFUSED), "")))
def test_settings_of_tables_are_accepted(text):
    build(tomllib.loads(text))


@pytest.mark.parametrize("text", settings(section(REFUSED)))
def test_settings_of_the_table_of_refusals_are_refused(text):
    with pytest.raises(ValueError, match=r"\w") as caught:
        build(tomllib.loads(text))
    if isinstance(caught.value, ValidationError):
        # Not for a key that there is not, or a value of another type.
        assert {error["type"] for error in caught.value.errors()} == {"value_error"}


def test_command_lines_are_accepted():
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
    lines = [line for line in lines if "--set" in line]
    assert lines
    for line in lines:
        words = shlex.split(line)
        given = [after for word, after in itertools.pairwise(words) if word == "--set"]
        build(merge({}, parse_overrides(given)))


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_every_option_is_listed_with_its_default(name):
    text = section(name)
    block = blocks(text, "toml")[0]
    given = tomllib.loads(block)["trainer"]["objective"]
    assert given.pop("name") == name
    options = TypeAdapter(ObjectiveOptions).validate_python({"name": name})
    comments = re.findall(r"#.*", block)
    for option in sorted(type(options).model_fields.keys() - {"name"}):
        default = getattr(options, option)
        if default is None:
            assert option not in given
            assert any(option in comment for comment in comments), f"{option} is not listed as off"
        else:
            assert given.pop(option) == default, option
    assert given == {}
    assert f"`{ABS_LOSS}`" in PAGE.split("\n### ")[0], "that of every objective"
    own = expected_means(options) - {ABS_LOSS}
    assert {metric for metric in own if f"`{metric}`" not in text} == set()
    for heading in ("Source:", "Reports", "Code:"):
        assert heading in text


def test_every_name_is_on_the_page():
    surrogates = get_args(HindsightOpd.model_fields["surrogate"].annotation)
    kinds = get_args(TeacherConfig.model_fields["kind"].annotation)
    titles = {
        "Surrogates of hindsight_opd": surrogates,
        "Teachers": (*kinds, *OBJECTIVE_NAMES),
        "Aggregation modes": get_args(AggregationMode),
        "Choosing an objective": [f'"{name}"' for name in OBJECTIVE_NAMES],
    }
    for title, names in titles.items():
        assert [name for name in names if name not in section(title)] == []


def test_presets_set_what_the_table_says():
    modes, seen = ("decoupled", "bypass", "pure_is"), []
    for weights, rules, veto, *cells in rows(section("Presets"))[1:]:
        for mode, cell in zip(modes, cells, strict=True):
            for name in re.findall(r"`(\w+)`", cell):
                seen.append(name)
                chosen = preset(name)
                assert (name, chosen.mode) == (name, mode)
                assert (name, *described(name)) == (name, weights, rules, veto)
    assert sorted(seen) == sorted(PRESET_NAMES)


def described(name: str) -> tuple[str, str, str]:
    """A preset's weights, rules and veto as the table writes them."""
    chosen = preset(name)
    low, high = chosen.importance_lower, f"{chosen.importance_upper:.4g}"
    span = f"to {high}" if low is None else f"{low:.4g} to {high}, else 0"
    weights = "none" if chosen.importance_level is None else f"{chosen.importance_level} {span}"
    spans = [
        f"{rule.statistic} to {rule.upper:.4g}"
        if rule.lower is None
        else f"{rule.statistic} {rule.lower:.4g} to {rule.upper:.4g}"
        for rule in chosen.rejections
    ]
    veto = "none" if chosen.veto_threshold is None else f"{chosen.veto_threshold:.4g}"
    return weights, ", ".join(spans) or "none", veto


def test_health_warnings_are_those_of_the_table():
    table = rows(section("Metrics and health"))[1:]
    for named, healthy, problem in table:
        metric = named.split("`")[1]
        bounds = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", healthy)]
        for bound in bounds:
            assert health_warnings({metric: bound}) == ()
        outside = [bounds[0] - 0.01] if not healthy.startswith("at most") else []
        outside += [bounds[-1] + 0.01] if not healthy.startswith("at least") else []
        for value in outside:
            (line,) = health_warnings({metric: value})
            assert line.endswith(problem)
