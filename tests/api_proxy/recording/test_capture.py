"""Version spans and drop reasons, decided on values alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proxy.config import ProxyConfig
from api_proxy.generation import LabelSpan, Rollout, SeenVersion
from api_proxy.recording.capture import (
    Circumstances,
    drop_reason,
    of_linked,
    sampling_record,
    version_spans,
)
from api_proxy.reply.reply import Reply
from api_proxy.reply.stop_strings import StopStrings
from records.names import DropReason, TurnType
from rollout_bridge.engine.types import Generation, PauseMode, SamplingParams, WeightSpan


def spans(*parts: tuple[str, int, int]) -> list[LabelSpan]:
    return [LabelSpan(label=label, start=start, end=end) for label, start, end in parts]


def numbers(parts: list[LabelSpan], length: int) -> tuple[list, DropReason | None]:
    found, fault = version_spans(parts, length)
    return [(span.version, span.start, span.end) for span in found], fault


def test_equal_neighbours_are_joined() -> None:
    assert numbers(spans(("3", 0, 2), ("3", 2, 4), ("4", 4, 5)), 5) == (
        [(3, 0, 4), (4, 4, 5)],
        None,
    )


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([], DropReason.UNKNOWN_VERSION),
        ([("default", 0, 5)], DropReason.UNKNOWN_VERSION),
        ([("-1", 0, 5)], DropReason.UNKNOWN_VERSION),
        ([("1", 0, 2), ("unknown", 2, 5)], DropReason.UNKNOWN_VERSION),
        ([("1", 0, 4)], DropReason.MIXED_VERSION),
        ([("1", 1, 5)], DropReason.MIXED_VERSION),
        ([("1", 0, 2), ("2", 3, 5)], DropReason.MIXED_VERSION),
    ],
)
def test_faults(parts: list, fault: DropReason) -> None:
    assert version_spans(spans(*parts), 5)[1] is fault


@pytest.mark.parametrize("parts", [[("1", 0, 6)], [("1", 0, 3), ("2", 2, 5)], [("1", 3, 2)]])
def test_spans_that_contradict_the_reply(parts: list) -> None:
    with pytest.raises(ValueError, match="version span"):
        version_spans(spans(*parts), 5)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_spans_that_tile_the_reply_are_kept(lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    parts = [
        (str(i), end - length, end)
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    found, fault = version_spans(spans(*parts), ends[-1])
    assert fault is None
    assert [(str(span.version), span.start, span.end) for span in found] == parts


def rollout(**changes) -> Rollout:
    values = {
        "prompt_ids": np.asarray([1, 2], dtype=np.int32),
        "params": SamplingParams(),
        "seen": SeenVersion(),
        "stops": StopStrings(str, ()),
        "ids": [5, 6],
        "logprobs": [-0.1, -0.2],
        "finish_reason": "stop",
    }
    return Rollout(**{**values, **changes})


HELLO = Reply(content="Hello", reasoning=None, tool_calls=())


@pytest.mark.parametrize(
    ("changes", "circumstances", "fault", "reason"),
    [
        ({}, {}, None, None),
        ({}, {"turn_type": TurnType.SIDE}, None, DropReason.SIDE_TURN),
        ({}, {"may_train": False}, None, DropReason.RECORD_ONLY),
        (
            {},
            {"may_train": False, "turn_type": TurnType.SIDE},
            None,
            DropReason.RECORD_ONLY,
        ),
        ({"finish_reason": "abort"}, {"client_gone": True}, None, DropReason.CLIENT_DISCONNECTED),
        ({"finish_reason": "abort"}, {}, None, DropReason.ABORTED),
        ({"finish_reason": "abort"}, {"is_cut": True}, None, DropReason.SHUTDOWN),
        ({}, {"is_cut": True}, None, None),
        ({"finish_reason": "length"}, {}, None, None),
        ({"logprobs": [-0.1, float("nan")]}, {}, None, DropReason.ROLLOUT_LOGPROBS_INVALID),
        ({"logprobs": [-0.1, float("-inf")]}, {}, None, DropReason.ROLLOUT_LOGPROBS_INVALID),
        ({}, {}, DropReason.UNKNOWN_VERSION, DropReason.UNKNOWN_VERSION),
        ({}, {}, DropReason.MIXED_VERSION, DropReason.MIXED_VERSION),
        ({"has_mixed_kv": True}, {}, None, DropReason.MIXED_VERSION),
        (
            {"has_mixed_kv": True},
            {},
            DropReason.UNKNOWN_VERSION,
            DropReason.UNKNOWN_VERSION,
        ),
        ({}, {"distribution_modified": "top_p"}, None, DropReason.DISTRIBUTION_MODIFIED),
        ({}, {"is_ambiguous": True}, None, DropReason.AMBIGUOUS_PARENT),
        (
            {"finish_reason": "length"},
            {"is_ambiguous": True, "distribution_modified": "temperature"},
            None,
            DropReason.AMBIGUOUS_PARENT,
        ),
    ],
)
def test_drop_reasons(
    changes: dict, circumstances: dict, fault: DropReason | None, reason: DropReason | None
) -> None:
    around = {
        "turn_type": TurnType.MAIN,
        "may_train": True,
        "is_ambiguous": False,
        "distribution_modified": None,
        **circumstances,
    }
    found = drop_reason(rollout(**changes), HELLO, Circumstances(**around), fault, ProxyConfig())
    assert found is reason


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, DropReason.AMBIGUOUS_PARENT),
        (DropReason.DISTRIBUTION_MODIFIED, DropReason.AMBIGUOUS_PARENT),
        (DropReason.LENGTH_CUT, DropReason.AMBIGUOUS_PARENT),
        (DropReason.CLIENT_DISCONNECTED, DropReason.AMBIGUOUS_PARENT),
        (DropReason.RECORD_ONLY, DropReason.RECORD_ONLY),
        (DropReason.SIDE_TURN, DropReason.SIDE_TURN),
        (DropReason.SENSITIVE, DropReason.SENSITIVE),
    ],
)
def test_an_ambiguous_request_is_so_whatever_became_of_its_answer(
    reason: DropReason | None, expected: DropReason
) -> None:
    assert of_linked(reason, is_ambiguous=True) is expected
    assert of_linked(reason, is_ambiguous=False) is reason


def test_mixed_versions_train_if_configured() -> None:
    around = Circumstances(
        turn_type=TurnType.MAIN, may_train=True, is_ambiguous=False, distribution_modified=None
    )
    config = ProxyConfig(train_mixed_version=True)
    mixed, unknown = DropReason.MIXED_VERSION, DropReason.UNKNOWN_VERSION
    assert drop_reason(rollout(), HELLO, around, mixed, config) is None
    assert drop_reason(rollout(has_mixed_kv=True), HELLO, around, None, config) is None
    assert drop_reason(rollout(), HELLO, around, unknown, config) is unknown
    assert sampling_record(rollout(has_mixed_kv=True))["mixed_kv"] is True


@pytest.mark.parametrize(
    ("pause_mode", "key", "cached", "labels", "is_mixed"),
    [
        ("in_place", "3", 8, ["3"], False),
        ("in_place", "3", 0, ["4"], False),
        ("in_place", "3", 8, ["4"], True),
        ("in_place", None, 8, ["4"], True),
        ("in_place", "3", 0, ["3", "4"], True),
        ("retract", "3", 8, ["3", "4"], False),
    ],
)
async def test_a_cache_of_several_weights_is_told_from_the_version_it_was_asked_for(
    pause_mode: PauseMode, key: str | None, cached: int, labels: list[str], is_mixed: bool
) -> None:
    engine = OneReply(labels, cached)
    rolled = Rollout(
        prompt_ids=np.asarray([1, 2], dtype=np.int32),
        params=SamplingParams(),
        seen=SeenVersion(label=key),
        stops=StopStrings(str, ()),
        pause_mode=pause_mode,
    )
    await rolled.run(engine)  # type: ignore[arg-type]
    assert rolled.has_mixed_kv is is_mixed
    assert engine.cache_key == (key if pause_mode == "in_place" else None)


class OneReply:
    """An engine with one reply of one token for each version, as SGLang reports it."""

    def __init__(self, labels: list[str], cached: int) -> None:
        self._labels, self._cached = labels, cached
        self.cache_key: str | None = None

    async def generate(self, input_ids, params, *, cache_key=None, **_: object) -> Generation:
        self.cache_key = cache_key
        count = len(self._labels)
        return Generation(
            output_ids=np.zeros(count, dtype=np.int32),
            output_logprobs=np.zeros(count, dtype=np.float32),
            text="",
            finish_reason="stop",
            matched=None,
            weight_version=self._labels[-1],
            weight_spans=tuple(
                WeightSpan(version=label, start=at, end=at + 1)
                for at, label in enumerate(self._labels)
            ),
            prompt_tokens=len(input_ids),
            cached_tokens=self._cached,
        )


def test_replies_cut_by_length_do_not_train_where_the_user_says_so() -> None:
    config = ProxyConfig(train_length_cut=False)
    around = Circumstances(
        turn_type=TurnType.MAIN, may_train=True, is_ambiguous=False, distribution_modified=None
    )
    cut = rollout(finish_reason="length")
    assert drop_reason(cut, HELLO, around, None, config) is DropReason.LENGTH_CUT
    assert drop_reason(rollout(), HELLO, around, None, config) is None
