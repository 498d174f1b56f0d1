"""Settings of the layer between records and engines.

Plain values, checked strictly; nothing here loads a tokenizer or opens a connection.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from rollout_bridge.engine.keys import EngineKeys


class RendererConfig(BaseModel):
    """How chat messages become token ids and back, for one model family.

    The renderer is named, never guessed: a guess for a local folder always lands on `default`,
    which cannot extend an earlier prompt and therefore re-tokenises sampled text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "qwen3"
    """Renderer of the package `renderers`: "qwen3", "glm-4.5", ... or "default", which applies the
    tokenizer's own chat template. An unknown name is refused when the renderer is loaded, with the
    list of known ones.
    """
    enable_thinking: bool | None = None
    """The chat template's switch of the same name; unset leaves the renderer's default."""
    thinking_retention: Literal["tool_cycle", "all"] | None = None
    """Which earlier reasoning stays in a prompt that extends the previous one: that of the running
    tool cycle, or all of it. Unset follows the model's template; `default` does not support it.
    """
    tool_parser: str | None = None
    """Only with `default`: parser of tool calls ("qwen3", "glm", ...). Unset: calls stay text."""
    reasoning_parser: str | None = None
    """Only with `default`: parser of reasoning ("think"). Unset: a leading <think> block is still
    split off.
    """


class ClaimLoopConfig(BaseModel):
    """Concurrency, polling and patience of one worker."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    concurrency: int = Field(default=24, ge=1)
    """Turns in flight at a time."""
    claim_ttl_s: float = Field(default=60.0, gt=0)
    """A claim that is not extended for this long expires. It is extended every third of this."""
    poll_min_s: float = Field(default=0.01, gt=0)
    """Shortest time between two claims while turns are waiting."""
    poll_max_s: float = Field(default=0.2, gt=0)
    """Longest time between two claims while none is waiting."""
    pause_min_s: float = Field(default=0.5, gt=0)
    """Pause after a first failure of the service; doubles with each further one."""
    pause_max_s: float = Field(default=30.0, gt=0)
    """Longest pause between two attempts while the service is down."""
    max_attempts: int = Field(default=5, ge=1)
    """Failures of one turn, with other turns succeeding in between, before it is dropped."""
    give_up_after_s: float = Field(default=3600.0, gt=0)
    """A turn that has been failing for this long is dropped, whether the service is up or not."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long turns in flight may take to finish after a stop is requested."""


class TeacherRoutes(BaseModel):
    """Which of several teachers scores a turn whose client names none: what is asked first counts.

    Each maps a name to that of a teacher.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sources: dict[str, str] = Field(default_factory=dict)
    """By where the task comes from: the header `X-Data-Source` of a request or its field
    `data_source`, the `data_source` of a recorded session.
    """
    keys: dict[str, str] = Field(default_factory=dict)
    """By the name of the API key."""
    tools: dict[str, str] = Field(default_factory=dict)
    """By a tool that the request offers; with several, the one that stands first here."""

    def teacher_of(
        self, *, source: str | None, key: str | None, tools: Collection[str]
    ) -> str | None:
        """The teacher for a request; None if no route applies."""
        if source is not None and source in self.sources:
            return self.sources[source]
        if key is not None and key in self.keys:
            return self.keys[key]
        return next((teacher for tool, teacher in self.tools.items() if tool in tools), None)

    @property
    def teachers(self) -> set[str]:
        """All that are named."""
        return {*self.sources.values(), *self.keys.values(), *self.tools.values()}


class ScoringConfig(BaseModel):
    """The teacher's identity and limits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    teacher: str = "teacher"
    """Name of the run's own teacher, stored with each score. It scores turns that name no teacher,
    unless `default_teacher` is set.
    """
    teachers: dict[str, str | list[str]] = Field(default_factory=dict)
    """Further teachers: name -> base URL of an engine, or of several with the same weights, which
    take turns; one that does not answer is left out for a while. A client names one for its
    requests in the header `X-Teacher` or the field `teacher`; a turn that names an unknown one is
    dropped as `unknown_teacher`.
    """
    routes: TeacherRoutes = TeacherRoutes()
    """Who scores turns whose client names no teacher, in place of the default one."""
    teacher_api_keys: dict[str, SecretStr] = Field(default_factory=dict)
    """Their keys, if they need them: name -> key."""
    allow_incompatible_teachers: bool = False
    """Train even with a teacher whose tokenizer or template differs from the policy's."""
    default_teacher: str | None = None
    """Teacher of turns that name none; unset: `teacher`."""
    top_k: int = Field(default=0, ge=0)
    """How many of the teacher's likeliest tokens are stored at each position of a response."""
    engine_scores: bool = True
    """Whether engines score. If not, only the hinted prompts are built and stored, for a teacher
    inside the trainer.
    """
    least_fall: float = Field(default=0.0, ge=0)
    """A hint must lower the teacher's log-prob of a token of the answer that it came from by at
    least this many nats; else the turn is dropped as `hint_agrees` and the hint is not remembered
    from it. 0: every accepted hint counts. Costs a second score of each turn; resampled answers are
    not checked.
    """
    expected_version: str | None = None
    """Weight version that the teacher must report; unset takes the first one that it reports."""
    context_length: int | None = Field(default=None, ge=2)
    """Most tokens of hinted prompt and response together; unset takes what the teacher reports."""
    loop: ClaimLoopConfig = ClaimLoopConfig()
    """Turns in flight, polling, and patience with a teacher that is down."""

    @field_validator("teachers")
    @classmethod
    def _endpoints_are_urls(cls, value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
        for name, given in value.items():
            urls = urls_in(given)
            if not name or not urls or not all(re.match(r"https?://\S+$", url) for url in urls):
                raise ValueError(
                    f"teacher {name!r} needs a name and a base URL, or several, got {given!r}"
                )
            if len(set(urls)) < len(urls):
                raise ValueError(f"teacher {name!r} names an engine twice: {given!r}")
        return value

    @model_validator(mode="after")
    def _teachers_are_told_apart(self) -> ScoringConfig:
        if self.teacher in self.teachers:
            raise ValueError(
                f"teachers.{self.teacher} has the name of the run's own teacher: give `teacher` "
                "another name, and set default_teacher if this one is meant"
            )
        if self.least_fall and not self.engine_scores:
            raise ValueError(
                "least_fall asks engines for scores: set engine_scores = true, or least_fall = 0"
            )
        if self.default_teacher not in (None, self.teacher, *self.teachers):
            raise ValueError(
                f"default_teacher {self.default_teacher!r} is not one of "
                f"{', '.join([self.teacher, *self.teachers])}"
            )
        if unknown := self.routes.teachers - {self.teacher, *self.teachers}:
            raise ValueError(
                f"routes: no teacher is called {min(unknown)!r}; give its URL in teachers"
            )
        if self.top_k and not self.engine_scores:
            raise ValueError(
                "top_k asks engines for scores: set engine_scores = true, or top_k = 0"
            )
        if unknown := self.teacher_api_keys.keys() - self.teachers:
            raise ValueError(
                f"teacher_api_keys.{min(unknown)}: no such teacher; give its URL in teachers"
            )
        return self

    def urls_of_teacher(self, name: str) -> list[str]:
        """The engines of a further teacher."""
        return urls_in(self.teachers[name])

    def keys_of_teacher(self, name: str) -> EngineKeys:
        """The keys that a further teacher needs."""
        key = self.teacher_api_keys.get(name)
        return EngineKeys(api=None if key is None else key.get_secret_value())


def urls_in(given: str | list[str]) -> list[str]:
    """One or several base URLs, as a list."""
    return [given] if isinstance(given, str) else given
