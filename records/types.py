"""The value types that cross a process boundary: turns, votes, verdicts, scores, policy versions.

Frozen dataclasses with lengths checked on construction. The store turns them into rows and back;
workers compute with them. Token arrays are numpy: int32 ids, float32 natural-log probabilities, one
entry per token. Nothing here knows SQL, HTTP or torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from records.lessons.names import LessonKind
from records.messages import EchoChange, Message, node_id, path_ids
from records.names import DropReason, HintRejection, TurnState, TurnType
from records.training.teaching import (
    UNSCORED,
    Experts,
    Ids,
    Logprobs,
    SideSamples,
    Teaching,
    check_experts,
    check_topk,
)
from records.turns.recording import Recording, RecordingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Response tokens [start, end) were sampled under policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnIdentity:
    """Identifies a redacted turn: hashes of the messages as they were.

    `node_ids` are those of the path: for each prompt message, then for the response.
    """

    node_ids: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn:
    """One answered request, as the proxy hands it to the store.

    `messages` is the whole prompt; `prompt_ids` [P] the exact ids the engine was given;
    `response_ids` [R] the exact ids it sampled, including the stop token; `rollout_logprobs` [R]
    their log-probabilities at the sampling temperature. If `token_parent_id` is set, the first
    `num_shared_ids` prompt ids equal the first ids of that turn's prompt + response (bridged
    prompts), and the store keeps only the rest. A `drop_reason` stores the turn as dropped.
    `teacher_key` names the teacher that the client asked for or a route chose, `data_source` where
    the task comes from, `user_id` the end user that it answers for. `request_echo` are the fields
    of the request that its client may read again with the reply; None: it may not ask for it again.
    `routed_experts` [T, layers, topk] are the experts that a mixture-of-experts engine sent each
    token to, T = P + R - 1: the last token went through no layer. `findings` counts secrets and
    personal data by kind (None: not looked for yet); a turn that was redacted has an `identity` and
    no tokens. `drop_detail` gives details of the drop: for a side turn, the rule that made it one.
    A turn of a `recording` may have no version, and NaN for `rollout_logprobs`: both come when the
    policy has scored it. `path` has the node ids of the prompt's messages as they were sent, and
    `body_hashes` the content hashes of all messages, the response's last: None where nobody has
    computed them yet.
    """

    turn_id: str
    session_id: str
    parent_turn_id: str | None
    turn_type: TurnType
    messages: list[Message]
    tools: list[dict[str, Any]]
    response: Message
    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs
    token_parent_id: str | None
    num_shared_ids: int
    sampling: dict[str, Any]
    distribution_modified: str | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    latency_s: float | None
    drop_reason: DropReason | None = None
    teacher_key: str | None = None
    data_source: str | None = None
    request_echo: dict[str, Any] | None = None
    routed_experts: Experts | None = None
    user_id: str | None = None
    findings: dict[str, int] | None = None
    identity: TurnIdentity | None = None
    drop_detail: str | None = None
    recording: Recording | None = None
    path: tuple[str, ...] | None = None
    body_hashes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.rollout_logprobs) != len(self.response_ids):
            raise ValueError(
                f"turn {self.turn_id}: {len(self.response_ids)} response ids but "
                f"{len(self.rollout_logprobs)} rollout log-probs"
            )
        if not 0 <= self.num_shared_ids <= len(self.prompt_ids):
            raise ValueError(
                f"turn {self.turn_id}: {self.num_shared_ids} shared ids "
                f"in a prompt of {len(self.prompt_ids)}"
            )
        if (self.token_parent_id is None) != (self.num_shared_ids == 0):
            raise ValueError(
                f"turn {self.turn_id}: token_parent_id and num_shared_ids belong together"
            )
        if self.routed_experts is not None:
            num_tokens = len(self.prompt_ids) + len(self.response_ids)
            check_experts(self.turn_id, self.routed_experts, num_tokens)

    def node_ids(self, scope: str) -> list[str]:
        """Node ids of the messages as they were sent, then of the response (`path_ids`)."""
        if self.identity is not None:
            return list(self.identity.node_ids)
        path = path_ids(scope, self.messages) if self.path is None else [*self.path]
        return [*path, node_id(path[-1] if path else scope, self.response)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRef:
    """What linking needs to know of an earlier turn, without its tokens."""

    turn_id: str
    session_id: str
    parent_turn_id: str | None
    state: TurnState
    drop_reason: DropReason | None
    prompt_node_id: str
    response_node_id: str
    has_next_state: bool
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A stored turn with everything that a worker may need; arrays as in `CapturedTurn`.

    `next_state` is what followed, then the feedback on the turn: `num_reactions` in total, where
    all messages that followed count as one. `feedback_reward`, on [-1, 1], is the newest score in
    it. `echo_changes` is what the client had changed in `response` when it went on: the history
    that it saw then differs from what was sampled. `for_hint_alone`: it is judged, or waits to be,
    although it can no longer train.
    """

    turn_id: str
    session_id: str
    parent_turn_id: str | None
    turn_type: TurnType
    state: TurnState
    drop_reason: DropReason | None
    messages: list[Message]
    tools: list[dict[str, Any]]
    response: Message
    next_state: list[Message]
    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs
    sampling: dict[str, Any]
    distribution_modified: str | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    created_at: float
    hint: str | None = None
    candidates: tuple[str, ...] = ()
    teacher_key: str | None = None
    data_source: str | None = None
    findings: dict[str, int] | None = None
    num_reactions: int = 0
    feedback_reward: float | None = None
    recording: Recording | None = None
    echo_changes: tuple[EchoChange, ...] = ()
    for_hint_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One judge answer: `score` is +1, -1 or None (abstained, or failed for the reason `error`).

    `rejected`: why its hint must not be used; the score still counts.
    """

    index: int
    score: int | None
    hint: str
    text: str
    latency_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    error: str | None = None
    rejected: HintRejection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judge's decision on a turn: the selected hint, or None.

    `num_omitted` messages were left out of its prompt to fit the judge's context. `candidates` are
    the hints worth scoring, the selected one first; if none are given, it is the only one. `reward`
    is what the votes say about the response itself; None: not asked for, or all abstained. With
    `awaits_outcome` its session's outcome will give it.
    """

    turn_id: str
    votes: tuple[Vote, ...]
    hint: str | None
    selection: str
    judge: str
    num_omitted: int = 0
    candidates: tuple[str, ...] = ()
    reward: float | None = None
    awaits_outcome: bool = False

    def __post_init__(self) -> None:
        if self.hint and not self.candidates:
            object.__setattr__(self, "candidates", (self.hint,))
        if self.candidates and self.candidates[0] != self.hint:
            raise ValueError(f"turn {self.turn_id}: the first candidate must be the selected hint")
        if len(set(self.candidates)) != len(self.candidates):
            raise ValueError(f"turn {self.turn_id}: a hint is a candidate twice")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"turn {self.turn_id}: reward {self.reward} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A teacher's log-probs [R] at temperature 1 of the response ids under one hinted prompt.

    `candidate` is the hint's place among the turn's candidates. `topk_ids`, `topk_logprobs` [R, K]
    are the teacher's most probable tokens at each position, if they were asked for. With
    `teacher_version` UNSCORED only the prompt was built, and `teacher_logprobs` are NaN.
    """

    turn_id: str
    hint: str
    teacher: str
    teacher_version: str
    hinted_prompt_ids: Ids
    teacher_logprobs: Logprobs
    latency_s: float
    candidate: int = 0
    topk_ids: Ids | None = None
    topk_logprobs: Logprobs | None = None

    def __post_init__(self) -> None:
        length = len(self.teacher_logprobs)
        check_topk(self.turn_id, length, self.topk_ids, self.topk_logprobs)
        if self.teacher_version == UNSCORED and not np.isnan(self.teacher_logprobs).all():
            raise ValueError(f"turn {self.turn_id}: log-probs of a teacher without a version")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyScore:
    """The policy's log-probs [R] of a recorded response, at temperature 1, under `version`."""

    turn_id: str
    version: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAnswer:
    """An earlier answer to a prompt, sampled by `version`; `length` counts its tokens. `outcome` is
    its session's; None: not known. `reward` is None if only the outcome gives it.
    """

    turn_id: str
    version: int
    reward: float | None
    length: int
    outcome: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHistory:
    """Rewarded answers to one prompt: the `recent` ones outside the batch, newest first, and the
    `first` ever, oldest first, which may include the batch's own.
    """

    recent: tuple[PastAnswer, ...] = ()
    first: tuple[PastAnswer, ...] = ()


NO_HISTORY = PromptHistory()


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSession:
    """The outcome of an earlier session, whose first turn `version` sampled, and what its turns
    were worth, if that was asked for.
    """

    session_id: str
    version: int
    outcome: float
    values: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """The outcome of a turn's session, in [0, 1]; None: nobody has given one.

    `start` is equal for sessions of one scope whose first turns have equal prompts; `past` are
    earlier ones, newest first, if they were asked for.
    """

    outcome: float | None = None
    start: str = ""
    past: tuple[PastSession, ...] = ()
    values: tuple[tuple[str, float | None], ...] = ()


UNKNOWN_OUTCOME = SessionOutcome()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySample:
    """One turn ready to train: ids and log-probs of one turn, never padded, lengths checked.

    prompt_ids [P], response_ids [R], rollout_logprobs [R] at `temperature`, teacher_logprobs [R] at
    temperature 1 under the selected `hint`: NaN if no engine scored the turn, and the hint is "" if
    it has none. `teachings` are all candidates, the selected hint's first; a turn that has only a
    `reward` has none. `after_tool`: the response follows a tool result. `step_index` counts the
    policy's earlier turns in its conversation. `is_cut`: the response ends at its token limit.
    `scope` is the turn's, `history` the earlier answers to its prompt and `session` its session's
    outcome, if they were asked for. `routed_experts` [P + R - 1, layers, topk]. `times_trained`
    counts the steps that trained it before.

    For a `lesson`, `turn_id` and `session_id` are the lesson's id, and `hint_id` names the hint of
    the memory that it was made for; its one teaching has the prompt that the teacher read, hinted
    or not.
    """

    turn_id: str
    session_id: str
    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs
    teacher_logprobs: Logprobs
    temperature: float
    distribution_modified: str | None
    version_spans: tuple[VersionSpan, ...]
    hint: str
    created_at: float
    after_tool: bool = False
    step_index: int = 0
    reward: float | None = None
    teachings: tuple[Teaching, ...] = ()
    routed_experts: Experts | None = None
    side_samples: SideSamples | None = None
    recording_kind: RecordingKind | None = None
    lesson: LessonKind | None = None
    hint_id: str | None = None
    is_cut: bool = False
    scope: str = ""
    history: PromptHistory = NO_HISTORY
    session: SessionOutcome = UNKNOWN_OUTCOME
    times_trained: int = 0

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.rollout_logprobs), len(self.teacher_logprobs)}
        if lengths != {len(self.response_ids)} or len(self.response_ids) == 0:
            raise ValueError(
                f"turn {self.turn_id}: response ids, rollout and teacher log-probs must have one "
                f"non-zero length, "
                f"got {len(self.response_ids)}, {len(self.rollout_logprobs)}, "
                f"{len(self.teacher_logprobs)}"
            )
        if len(self.prompt_ids) == 0:
            raise ValueError(f"turn {self.turn_id}: a prompt without tokens cannot be scored")
        self._check_extras()

    def fits_vocabulary(self, size: int) -> bool:
        """Whether every id that training may look at is in [0, `size`)."""
        ids = [self.prompt_ids, self.response_ids]
        for teaching in self.teachings:
            ids.append(teaching.hinted_prompt_ids)
            if teaching.topk_ids is not None:
                ids.append(teaching.topk_ids)
        if self.side_samples is not None:
            ids.append(self.side_samples.ids)
        return all(one.min() >= 0 and one.max() < size for one in ids if one.size)

    def _check_extras(self) -> None:
        length = len(self.response_ids)
        for teaching in self.teachings:
            teaching.check(self.turn_id, length)
        if self.side_samples is not None:
            self.side_samples.check(self.turn_id, length)
        if self.routed_experts is not None:
            check_experts(self.turn_id, self.routed_experts, len(self.prompt_ids) + length)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of its tokens."""
        return min(span.version for span in self.version_spans)


START = "start"
"""The checkpoint of a version that was not trained: the weights that the run began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One published state of the policy: 0 is the start weights, each trained step adds one.

    `restores`: this one is a rollback, and has the weights of that version.
    """

    version: int
    parent_version: int | None
    checkpoint: str
    manifest_hash: str
    created_at: float
    abandoned: bool = False
    restores: int | None = None
