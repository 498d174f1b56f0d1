"""What is kept of an answered request, and whether it may train: the last pure step of a turn.

Decides from the rollout, the reply and the configuration. It neither talks to the engine nor
writes to the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from api_proxy.config import ProxyConfig
from api_proxy.generation import LabelSpan, Rollout
from api_proxy.reply.reply import Reply
from records.names import DropReason, TurnType
from records.types import Experts, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What surrounded the sampling of a reply, as far as it matters for training.

    `may_train`: whether the key that asked consents to training. `is_cut`: the proxy is stopping.
    """

    turn_type: TurnType
    may_train: bool
    is_ambiguous: bool
    distribution_modified: str | None
    client_gone: bool = False
    is_cut: bool = False


def version_spans(
    spans: Sequence[LabelSpan], num_tokens: int
) -> tuple[tuple[VersionSpan, ...], DropReason | None]:
    """Spans with the policy's version numbers, and why they do not cover the reply, if so.

    A label that is not a number, or no span at all: `unknown_version`. Tokens outside the spans
    belong to no single version: `mixed_version`. Spans that overlap or leave the reply raise
    ValueError.
    """
    numbered: list[VersionSpan] = []
    position = 0
    has_gap = False
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.start < position or not span.start <= span.end <= num_tokens:
            raise ValueError(
                f"version span [{span.start}, {span.end}) does not fit {num_tokens} tokens"
            )
        if span.start == span.end:
            continue
        version = _number(span.label)
        if version is None:
            return (), DropReason.UNKNOWN_VERSION
        has_gap |= span.start > position
        position = span.end
        previous = numbered[-1] if numbered else None
        if previous and previous.version == version and previous.end == span.start:
            numbered[-1] = VersionSpan(version=version, start=previous.start, end=span.end)
        else:
            numbered.append(VersionSpan(version=version, start=span.start, end=span.end))
    if not numbered:
        return (), DropReason.UNKNOWN_VERSION
    has_gap |= position < num_tokens
    return tuple(numbered), DropReason.MIXED_VERSION if has_gap else None


_ABOUT_THE_ANSWER = frozenset(
    {
        DropReason.CLIENT_DISCONNECTED,
        DropReason.SHUTDOWN,
        DropReason.ABORTED,
        DropReason.EMPTY_RESPONSE,
        DropReason.ROLLOUT_LOGPROBS_INVALID,
        DropReason.UNKNOWN_VERSION,
        DropReason.MIXED_VERSION,
        DropReason.LENGTH_CUT,
        DropReason.DISTRIBUTION_MODIFIED,
    }
)
"""Reasons that concern only the answer, so that hints may be practised at the request."""


def of_linked(reason: DropReason | None, *, is_ambiguous: bool) -> DropReason | None:
    """A turn's `reason` once it is linked: hints cannot be practised at an ambiguous request,
    whatever became of its answer.
    """
    if is_ambiguous and (reason is None or reason in _ABOUT_THE_ANSWER):
        return DropReason.AMBIGUOUS_PARENT
    return reason


def drop_reason(
    rollout: Rollout,
    reply: Reply,
    circumstances: Circumstances,
    version_fault: DropReason | None,
    config: ProxyConfig,
) -> DropReason | None:
    """Why this turn does not train; the first reason that holds, None if it may."""
    modified = circumstances.distribution_modified is not None
    is_broken_off = rollout.finish_reason in (None, "abort")
    is_gapped = version_fault is DropReason.MIXED_VERSION
    is_mixed = is_gapped or rollout.has_mixed_kv
    other_fault = version_fault is not None and not is_gapped
    tests = (
        (DropReason.RECORD_ONLY, not circumstances.may_train),
        (DropReason.TEXT_COMPLETION, circumstances.turn_type is TurnType.TEXT),
        (DropReason.SIDE_TURN, circumstances.turn_type is TurnType.SIDE),
        (DropReason.CLIENT_DISCONNECTED, circumstances.client_gone),
        (DropReason.SHUTDOWN, circumstances.is_cut and is_broken_off),
        (DropReason.ABORTED, is_broken_off),
        (DropReason.EMPTY_RESPONSE, not rollout.ids or reply.is_empty),
        (
            DropReason.ROLLOUT_LOGPROBS_INVALID,
            rollout.has_invalid_logprobs or not np.isfinite(rollout.logprobs).all(),
        ),
        (DropReason.UNKNOWN_VERSION, other_fault),
        (DropReason.MIXED_VERSION, is_mixed and not config.train_mixed_version),
        (
            DropReason.LENGTH_CUT,
            rollout.finish_reason == "length" and not config.train_length_cut,
        ),
        (DropReason.DISTRIBUTION_MODIFIED, modified and config.train_modified == "drop"),
    )
    found = next((reason for reason, holds in tests if holds), None)
    return of_linked(found, is_ambiguous=circumstances.is_ambiguous)


def whole_experts(rollout: Rollout) -> Experts | None:
    """The routed experts of prompt and reply; None unless those of every token are known."""
    experts, num_tokens = rollout.routed_experts, len(rollout.prompt_ids) + len(rollout.ids)
    return experts if experts is not None and len(experts) == num_tokens - 1 else None


def sampling_record(rollout: Rollout, enable_thinking: bool | None = None) -> dict[str, Any]:
    """How the reply was sampled, as it is stored; `enable_thinking` is the chat template's switch
    if the request set it: it is needed to render the prompt again.
    """
    params = rollout.params
    switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return {
        **switches,
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": int(params.top_k),
        "min_p": float(params.min_p),
        "frequency_penalty": float(params.frequency_penalty),
        "presence_penalty": float(params.presence_penalty),
        "repetition_penalty": float(params.repetition_penalty),
        "min_new_tokens": int(params.min_new_tokens),
        "max_new_tokens": int(params.max_new_tokens),
        "stop": list(params.stop),
        "seed": params.seed,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias},
        "grammar": params.grammar.text if params.grammar else None,
        "num_continuations": rollout.num_continuations,
        "num_cached_tokens": rollout.num_cached_tokens,
        "mixed_kv": rollout.has_mixed_kv,
    }


def _number(label: str) -> int | None:
    try:
        version = int(label)
    except ValueError:
        return None
    return version if version >= 0 else None
