"""What happens to each field of a request: one rule and one table for all APIs.

A field that would change the answer is served, or refused by name with 400; a value that changes
nothing (null, or what applies anyway) is accepted. Metadata is accepted. A field that asks for more
or less of something that this model cannot adjust is accepted without effect, and so is an unknown
field: the response names both in `x-ignored-fields`.

Each API lists the fields that it serves itself; the others are looked up here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from api_proxy.errors import ApiError, unsupported

HEADER = "x-ignored-fields"
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 20

SAMPLING = (
    *("top_k", "min_p", "seed", "logit_bias", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Fields of chat completions that every API serves under the same name."""
SHAPING = (
    *("regex", "guided_regex", "guided_json", "guided_choice", "structured_outputs"),
    "chat_template_kwargs",
)
"""Those that every API for conversations serves: a text that is continued has no template."""
SESSION = ("session_id", "session_done", "turn_type", "teacher", "data_source")
"""This project's own."""

METADATA = frozenset(
    {
        *("metadata", "user", "safety_identifier", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"),
        *("cache_salt", "extra_key", "request_id", "rid", "user_id", "priority", "custom_labels"),
        *("betas", "user_profile_id", "workspace_id", "billing_policy", "diagnostics"),
        *("inference_geo", "fallback_credit_token", "client_metadata", "litellm_metadata"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"),
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        *("return_cached_tokens_details", "return_meta_info", "title", "stream_options"),
    }
)
"""Fields that say something about the request and nothing about its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A field that is not served; `neutral` values change nothing, `instead` says what to send."""

    neutral: tuple[Any, ...] = (False, 0, "", [], {})
    instead: str = ""


_ON = Refused(neutral=(True,))
"""Always on here: only switching it off is refused."""
_OFF = Refused()
_TEXT_ONLY = Refused(neutral=(["text"], []), instead="this model reads and writes text only")
_ONE_GRAMMAR = Refused(instead="send a JSON schema or a regular expression")

REFUSED: Mapping[str, Refused] = {
    # OpenAI's.
    "functions": Refused(instead="send 'tools'"),
    "function_call": Refused(neutral=("none",), instead="send 'tool_choice'"),
    "modalities": _TEXT_ONLY,
    **dict.fromkeys(("audio", "image"), Refused(instead=_TEXT_ONLY.instead)),
    **dict.fromkeys(("prediction", "moderation"), _OFF),
    "web_search_options": Refused(neutral=()),  # empty ones ask for a search, too
    **dict.fromkeys(("background", "conversation", "prompt", "context_management"), _OFF),
    **dict.fromkeys(("suffix", "echo"), _OFF),
    "best_of": Refused(neutral=(0, 1), instead="ask for 'n' answers"),
    # Anthropic's.
    **dict.fromkeys(("mcp_servers", "container", "compaction", "fallbacks", "thread"), _OFF),
    "prefill": _OFF,
    # Prompts and templates.
    "continue_final_message": Refused(instead="the last message must not be the assistant's"),
    "add_generation_prompt": _ON,
    **dict.fromkeys(("chat_template", "documents", "add_special_tokens", "input_ids"), _OFF),
    **dict.fromkeys(("prompt_embeds", "truncate_prompt_tokens", "task"), _OFF),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "images_config"), _TEXT_ONLY),
    "use_audio_in_video": _TEXT_ONLY,
    # Grammars; those that an API serves are looked up there first.
    **dict.fromkeys((*SHAPING, "response_format", "tools", "tool_choice", "json_schema"), _OFF),
    **dict.fromkeys(("ebnf", "guided_grammar", "grammar", "structural_tag"), _ONE_GRAMMAR),
    # Sampling.
    **dict.fromkeys(SAMPLING, _OFF),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "logits_processors", "min_length"), _OFF),
    **dict.fromkeys(("custom_logit_processor", "custom_params", "vllm_xargs"), _OFF),
    "bad_words": Refused(instead="bias their ids in 'logit_bias'"),
    "allowed_token_ids": Refused(instead="bias ids in 'logit_bias'"),
    **dict.fromkeys(("stop_token_ids", "stop_regex"), Refused(instead="send 'stop'")),
    "length_penalty": Refused(neutral=(1,)),
    "early_stopping": _OFF,
    **dict.fromkeys(
        ("top_a", "dry_multiplier", "xtc_probability", "mirostat", "mirostat_mode"), _OFF
    ),
    **dict.fromkeys(
        ("typical_p", "tfs", "tfs_z", "epsilon_cutoff", "eta_cutoff"), Refused(neutral=(0, 1))
    ),
    "repeat_penalty": Refused(neutral=(1,), instead="send 'repetition_penalty'"),
    **dict.fromkeys(("lora_path", "ngram_corpus_id", "session_params", "options"), _OFF),
    # What the reply shows.
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), _ON),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), _ON),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), _OFF),
    **dict.fromkeys(("prompt_logprobs", "return_hidden_states", "return_routed_experts"), _OFF),
    **dict.fromkeys(("return_token_ids", "return_prompt_token_ids"), _OFF),
    "return_tokens_as_token_ids": _OFF,
}


def check_fields(body: Mapping[str, Any], served: Collection[str]) -> tuple[str, ...]:
    """The fields of `body` that have no effect, by name. Raises ApiError 400 on a refused one.

    The API itself handles those that are `served`.
    """
    ignored = []
    for name, value in body.items():
        if value is None or name in served or name in METADATA:
            continue
        refused = REFUSED.get(name)
        if refused is None:
            ignored.append(name)
        elif not _is_among(value, refused.neutral):
            instead = f": {refused.instead}" if refused.instead else ""
            raise unsupported(f"'{name}' is not supported{instead}.", name)
    return tuple(ignored)


def is_media(kind: str) -> bool:
    """Whether a part of this kind is not text: `image_url`, `input_audio`, `document`..."""
    return any(word in kind for word in ("image", "audio", "video", "file", "document"))


def text_only(place: str, kind: str, param: str | None = None) -> ApiError:
    """400: the part at `place` is not text."""
    article = "an" if kind[:1] in "aeiou" else "a"
    message = f"This model takes text only: {place} is {article} {kind[:100]}."
    return unsupported(message, param or place)


def header_of(ignored: Collection[str]) -> dict[str, str]:
    """The response's header that names them; a name that is not a plain word is only counted."""
    if not ignored:
        return {}
    plain = [name for name in ignored if _PLAIN.fullmatch(name)][:_MOST_NAMES]
    left = len(ignored) - len(plain)
    return {HEADER: ", ".join([*plain, *([f"{left} more"] if left else [])])}


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether it equals one of them; True is not 1, and False is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
