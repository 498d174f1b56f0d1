"""What an engine reports in `/server_info`, and which of it this project cannot work with.

Read once, before a run sends anything else: an old version or a flag that changes the meaning of
replies is refused by name instead of showing up as odd data. Pure; the versions are SGLang
releases, checked in their sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout_bridge.engine.errors import EngineProtocolError

Version = tuple[int, ...]
Kind = Literal["sglang", "embedded", "router"]

OLDEST: Version = (0, 5, 7)
"""The oldest SGLang with all that is needed: /model_info, pause modes, cumulative ids."""
INCREMENTAL_SINCE: Version = (0, 5, 11)
"""From here on streams may carry new tokens only: ids and log-probs are then cut alike."""
QUEUE_SINCE: Version = (0, 5, 21)
"""From here on weights can change while requests wait in the queue (retracted ones do); an older
server asserts that none waits, and exits.
"""
SPANS_SINCE: Version = (0, 5, 20)
"""From here on replies tell which weights sampled each token (`weight_versions`)."""
VOCABULARY_CHECK_SINCE: Version = (0, 5, 14)
"""From here on an id outside the vocabulary in `token_ids_logprob` is refused and named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The parts of `/server_info` that matter here.

    `version` is None if there is none to compare: the embedded engine is part of this project, and
    a router does not report one. `problems` are the settings that change the meaning of replies,
    one line each with what to do. `num_workers` is for routers only.
    """

    kind: Kind
    version: Version | None = None
    problems: tuple[str, ...] = ()
    returns_routed_experts: bool | None = None
    num_workers: int | None = None

    @property
    def reports_spans(self) -> bool | None:
        """Whether replies carry the weight version of each token; None for a router."""
        if self.kind == "router":
            return None
        return self.version is None or self.version >= SPANS_SINCE

    @property
    def keeps_its_queue(self) -> bool:
        """Whether a weight update may find requests waiting."""
        return self.version is None or self.version >= QUEUE_SINCE

    @property
    def checks_vocabulary(self) -> bool:
        """Whether it can be asked for its vocabulary's size without harm."""
        return self.version is not None and self.version >= VOCABULARY_CHECK_SINCE

    @property
    def name(self) -> str:
        """For messages: "SGLang 0.5.23"."""
        if self.kind != "sglang" or self.version is None:
            return "the embedded engine" if self.kind == "embedded" else "SGLang's router"
        return f"SGLang {shown(self.version)}"


def read_server_info(body: Any) -> ServerInfo:
    """The parsed body. Raises EngineProtocolError if it is of none of the three kinds."""
    if not isinstance(body, dict):
        raise EngineProtocolError("/server_info is not a JSON object: is this an SGLang server?")
    if body.get("router_manager") is True:
        return ServerInfo(kind="router", num_workers=int(body.get("workers_count") or 0))
    if body.get("engine") == "embedded":
        return ServerInfo(kind="embedded")
    version = _version(body.get("version"))
    return ServerInfo(
        kind="sglang",
        version=version,
        problems=tuple(_problems(version, body)),
        returns_routed_experts=bool(body.get("enable_return_routed_experts")),
    )


def shown(version: Version) -> str:
    """ "0.5.23" """
    return ".".join(map(str, version))


def _version(value: Any) -> Version:
    # Releases are 0.5.23, 0.5.23.post1, 0.5.23rc2; a build from source may be 0.0.0.dev1+gabc.
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", value) if isinstance(value, str) else None
    if found is None:
        raise EngineProtocolError(
            f"/server_info names the version {value!r}: is this an SGLang server?"
        )
    return tuple(map(int, found.groups()))


def _problems(version: Version, body: Mapping[str, Any]) -> list[str]:
    if version < OLDEST:
        # The meaning of the rest of its answer is not known.
        return [
            f"SGLang {shown(version)} is older than {shown(OLDEST)}, which the weight updates "
            "need: install a newer one"
        ]
    problems = [message for key, message in _FLAGS.items() if body.get(key)]
    if body.get("incremental_streaming_output") and version < INCREMENTAL_SINCE:
        problems.append(
            f"SGLang {shown(version)} is not known to stream new tokens with their log-probs: "
            "start it without --incremental-streaming-output, or install "
            f"{shown(INCREMENTAL_SINCE)}"
        )
    if body.get("disaggregation_mode") not in (None, "null"):
        problems.append(
            f"it runs one half of a disaggregated pair ({body['disaggregation_mode']}): "
            "start it without --disaggregation-mode"
        )
    return problems


_WATERMARK = "it watermarks what it samples: start it without --watermark-config"
_FLAGS = {
    "is_embedding": "it serves embeddings: start it without --is-embedding",
    "allow_auto_truncate": (
        "it would cut long prompts silently: start it without --allow-auto-truncate"
    ),
    "stream_output": (
        "its streams carry only new ids, but all log-probs: start it without --stream-output"
    ),
    "skip_tokenizer_init": (
        "it has no tokenizer, which stop strings and the judge need: start it without "
        "--skip-tokenizer-init"
    ),
    "preferred_sampling_params": (
        "it changes how requests sample: start it without --preferred-sampling-params"
    ),
    "enable_deterministic_inference": (
        "requests without a seed all get the same one, so that equal prompts (votes!) have equal "
        "answers: start it without --enable-deterministic-inference"
    ),
    "watermark_default_enabled": _WATERMARK,
    "watermark_enforce_all": _WATERMARK,
}
