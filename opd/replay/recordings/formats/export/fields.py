"""The fields of an export's line, checked. `sessions.py` describes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Identity = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=0)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    """No conversions; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ExportedSampling(_Strict):
    """The part of `sampling` that determines how the prompt is rendered."""

    enable_thinking: bool | None = None


class ExportedTurn(_Strict):
    """A turn as a line contains it, its messages unchecked."""

    turn_id: _Identity
    parent_turn_id: str | None
    position: _Count
    shared_messages: _Count = 0
    messages: list[Any]
    tools: list[Any] | None = None
    response: dict[str, Any]
    next_state: list[Any]
    turn_type: str = "main"
    prompt_ids: list[_TokenId] | None = None
    shared_ids: _Count = 0
    response_ids: list[_TokenId] | None = None
    rollout_logprobs: list[_Finite] | None = None
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    distribution_modified: str | None = None
    votes: list[str] | None = None
    sampling: ExportedSampling | None = None
    data_source: str | None = None

    @model_validator(mode="after")
    def _tokens_are_whole(self) -> ExportedTurn:
        if (self.prompt_ids is None) != (self.response_ids is None):
            raise ValueError("prompt_ids and response_ids must both be there, or neither")
        if self.rollout_logprobs is not None:
            ids = self.response_ids
            if ids is None or len(ids) != len(self.rollout_logprobs):
                raise ValueError("there must be one rollout log-prob for each response id")
        return self


class ExportedSession(_Strict):
    """A line, its turns unchecked."""

    session_id: _Identity
    outcome_reward: _Finite | None
    renderer: str | None
    turns: list[Any]
