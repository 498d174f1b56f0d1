"""The columns of the Parquet files, by name and kind; parquet.py describes the kinds.

Times are unix seconds, log-probs natural, ids int32, rewards on [-1, 1].
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "text", "int", "float", "ids", "logprobs", "texts", "json", "spans", "messages"
]
Columns: TypeAlias = tuple[tuple[str, Kind], ...]

TURNS: Columns = (
    ("session_id", "text"),
    ("session_name", "text"),
    ("turn_id", "text"),
    ("parent_turn_id", "text"),
    ("position", "int"),
    ("turn_type", "text"),
    ("state", "text"),
    ("drop_reason", "text"),
    ("drop_detail", "text"),
    ("messages", "json"),
    ("tools", "json"),
    ("response", "json"),
    ("next_state", "json"),
    ("feedback", "json"),
    ("renderer", "text"),
    ("prompt_ids", "ids"),
    ("response_ids", "ids"),
    ("rollout_logprobs", "logprobs"),
    ("temperature", "float"),
    ("sampling", "json"),
    ("distribution_modified", "text"),
    ("version_spans", "spans"),
    ("data_source", "text"),
    ("teacher_key", "text"),
    ("teacher", "text"),
    ("votes", "texts"),
    ("hint", "text"),
    ("reward", "float"),
    ("trained_version", "int"),
    ("recording", "text"),
    ("finish_reason", "text"),
    ("created_at", "float"),
)
VOTES: Columns = (
    ("session_id", "text"),
    ("turn_id", "text"),
    ("index", "int"),
    ("score", "int"),
    ("hint", "text"),
    ("rejected", "text"),
    ("text", "text"),
    ("error", "text"),
    ("latency_s", "float"),
    ("prompt_tokens", "int"),
    ("completion_tokens", "int"),
)
HINTS: Columns = (
    ("session_id", "text"),
    ("turn_id", "text"),
    ("hint", "text"),
    ("candidates", "texts"),
    ("reward", "float"),
    ("selection", "text"),
    ("judge", "text"),
    ("num_omitted", "int"),
)
SAMPLES: Columns = (
    ("session_id", "text"),
    ("turn_id", "text"),
    ("version", "int"),
    ("staleness", "int"),
    ("data_source", "text"),
    ("teacher_key", "text"),
    ("advantage_mean", "float"),
    ("advantage_abs_max", "float"),
    ("advantages", "logprobs"),
    ("log_ratios", "logprobs"),
    ("weights", "logprobs"),
    ("entropies", "logprobs"),
    ("engine_gaps", "logprobs"),
    ("response_ids", "ids"),
    ("rollout_logprobs", "logprobs"),
    ("teacher", "text"),
    ("teacher_version", "text"),
    ("teacher_logprobs", "logprobs"),
    ("hint", "text"),
    ("created_at", "float"),
)
SFT: Columns = (
    ("messages", "messages"),
    ("tools", "json"),
    ("turn_id", "text"),
    ("session_id", "text"),
    ("data_source", "text"),
)
PREFERENCE: Columns = (
    ("prompt", "messages"),
    ("chosen", "messages"),
    ("rejected", "messages"),
    ("tools", "json"),
    ("turn_id", "text"),
    ("session_id", "text"),
    ("data_source", "text"),
    ("source", "text"),
    ("rejected_turn_id", "text"),
    ("rejected_session_id", "text"),
)
