"""Request bodies of the embedded engine, checked on arrival, in the shapes that SGLang takes.

Unknown top-level fields are ignored, unknown sampling fields are refused, and so are sampling
features that this engine does not have.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.model.grammar import Kind
from rollout_bridge.embedded.scheduling.request import Sampling

_UNSUPPORTED = (
    "stop_regex",
    "ebnf",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)
"""Sampling fields of SGLang without an equivalent here."""


class SamplingBody(BaseModel):
    """`sampling_params` of /generate."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_new_tokens: int | None = Field(default=128, ge=0)
    temperature: float = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    min_new_tokens: int = Field(default=0, ge=0)
    n: int = Field(default=1, ge=1, le=64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    json_schema: str | None = None
    regex: str | None = None
    structural_tag: str | None = None

    @field_validator("temperature")
    @classmethod
    def _finite_temperature(cls, value: float) -> float:
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"temperature must be a non-negative finite number, got {value:g}.")
        return value

    @property
    def grammar(self) -> tuple[Kind, str] | None:
        """The requested grammar. Raises BadRequest when there are several."""
        given: list[tuple[Kind, str | None]] = [
            ("json_schema", self.json_schema),
            ("regex", self.regex),
            ("structural_tag", self.structural_tag),
        ]
        grammars: list[tuple[Kind, str]] = [(kind, text) for kind, text in given if text]
        if len(grammars) > 1:
            raise BadRequest("Only one of json_schema, regex, or structural_tag can be set.")
        return grammars[0] if grammars else None

    def to_sampling(self, model_stop_ids: frozenset[int], room: int) -> Sampling:
        """The engine's own form; without a maximum, `room` tokens may be sampled."""
        own = frozenset(self.stop_token_ids or ())
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            bias = tuple((int(key), value) for key, value in (self.logit_bias or {}).items())
        except ValueError as error:
            raise BadRequest(f"logit_bias: {error}") from None
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=bias,
            max_new_tokens=room if self.max_new_tokens is None else self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=tuple(text for text in stop if text),
            stop_token_ids=own if self.ignore_eos else own | model_stop_ids,
            seed=self.sampling_seed,
            grammar=self.grammar,
            skip_special_tokens=self.skip_special_tokens,
        )


class GenerateBody(BaseModel):
    """Body of /generate for one sequence."""

    model_config = ConfigDict(extra="ignore", strict=True)

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = Field(default=0, ge=0, le=1024)
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | None = None
    extra_key: str | None = None
    priority: int = 0
    lora_path: str | None = None
    """Name of a loaded adapter; null: the base."""


class ControlBody(BaseModel):
    """A body whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class UpdateWeightsBody(ControlBody):
    """Body of /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class LoadAdapterBody(ControlBody):
    """Body of /load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str


class UnloadAdapterBody(ControlBody):
    """Body of /unload_lora_adapter."""

    lora_name: str


class PauseBody(ControlBody):
    """Body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(ControlBody):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


def parse_sampling(value: dict[str, Any]) -> SamplingBody:
    """Checked sampling parameters; raises BadRequest in SGLang's words for unknown fields."""
    for name in _UNSUPPORTED:
        if value.get(name) is not None:
            raise BadRequest(f"{name} is not supported by the embedded engine")
    known = {name: item for name, item in value.items() if name not in _UNSUPPORTED}
    try:
        return SamplingBody.model_validate(known)
    except ValidationError as error:
        raise BadRequest(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        expected = ", ".join(f"`{field}`" for field in (*SamplingBody.model_fields, *_UNSUPPORTED))
        return f"unknown field `{name}`, expected one of {expected}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"]
    return f"{name}: {problem['msg']}, got {problem['input']!r}"


def explain(error: ValidationError) -> str:
    """All problems of a body, one line each."""
    lines = [
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    ]
    return f"{len(lines)} validation error{'s' if len(lines) > 1 else ''}: " + "; ".join(lines)
