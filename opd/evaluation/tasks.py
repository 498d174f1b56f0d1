"""What a task suite is: tasks that a policy tries, each try passed or not, by metric.

A suite comes from a factory, named here or by its dotted path ("package.module:function"): the
packages that provide suites are above this one, so they are imported by name when needed. Nothing
here samples.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from records.messages import Message
from trainer.errors import StartupError

SUITES = {"lab": "examples.tool_lab.eval_suite:suite"}
"""Task suites by name. (The suite "recorded" has no tasks: see `recorded`.)"""

Check = Callable[[Message], bool]


class Answer(Protocol):
    """The policy under evaluation: samples the next assistant message of a conversation."""

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> Message: ...


class Task(Protocol):
    """Something to try. `task_id` is the same in every run with the same seed: tasks are paired by
    it, and the samples' seeds derive from it.
    """

    @property
    def task_id(self) -> str: ...

    async def attempt(self, answer: Answer) -> Mapping[str, bool]:
        """Try once; returns whether it passed, by metric (the same metrics each time)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """The usual task: one prompt, and checks of its answer by metric."""

    task_id: str
    messages: Sequence[Message]
    checks: Mapping[str, Check]
    tools: Sequence[dict[str, Any]] = ()

    async def attempt(self, answer: Answer) -> Mapping[str, bool]:
        """One answer, checked."""
        message = await answer(self.messages, self.tools)
        return {metric: check(message) for metric, check in self.checks.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSuite:
    """Tasks, and how they are asked. `headline` are the metrics that the plot shows."""

    name: str
    tasks: Sequence[Task]
    headline: Sequence[str]
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"suite {self.name} has no tasks")
        if len({task.task_id for task in self.tasks}) != len(self.tasks):
            raise ValueError(f"suite {self.name}: two tasks have the same id")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    """What a factory must provide: about `tasks` held-out tasks for each metric, for the run in
    `folder`; equal seeds give equal tasks.
    """

    folder: Path
    model: str
    tasks: int
    seed: int


def load_suite(name: str, request: SuiteRequest) -> TaskSuite:
    """The suite of this name or dotted path. Raises StartupError if there is none."""
    path = SUITES.get(name, name)
    module, separator, function = path.partition(":")
    if not separator:
        known = ", ".join([*SUITES, "recorded"])
        raise StartupError(
            f"--suite {name}: unknown; known: {known}, or your own as package.module:function"
        )
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise StartupError(f"--suite {name}: cannot import {path}: {error}") from None
    return factory(request)
