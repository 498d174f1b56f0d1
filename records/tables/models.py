"""The tables of sessions and turns, and of policy versions. ORM rows never leave `records`: the
store gives and takes `records.types`. The tables of hints, lessons, outcomes, keys and deletions
are in `rows.py` of their packages, and in key_rows.py.

A turn's state (hot, rewritten at each transition) and its tokens (cold, written once) are in
different tables: SQLite rewrites a whole row, blobs included, when any of its columns changes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    exists,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from records.names import (
    DropReason,
    FeedbackOutcome,
    HintRejection,
    ReviewDecision,
    SideSource,
    TurnState,
    TurnType,
)
from records.tables.columns import (
    CleanText,
    ExpertsBlob,
    HalvesBlob,
    IdsBlob,
    JsonText,
    LogprobsBlob,
    enum_column,
)
from records.turns.recording import RecordingKind

IS_UNSAID = text("drop_reason IN ('no_outcome', 'no_next_state')")
"""Of a row of `turns`: dropped because its next state, or its session's outcome, is unknown."""
IS_SIDE_TURN = text("drop_reason = 'side_turn'")
"""As text: a partial index of such rows is not used if the value is a parameter."""
IS_NOT_INDEXED = text("NOT is_indexed")
"""Of a row of `turn_texts`: the text of its turn cannot be found yet."""
HAS_TRAINED = text("trained_version IS NOT NULL")
"""Of a row of `turns`: a version trained it."""
TRAINS_AGAIN = text("times_left > 0")
"""Of a row of `turns`: it has trained and may train again."""


class Base(DeclarativeBase):
    """Root of the tables; constraint names are fixed so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class SessionRow(Base):
    """One conversation as the proxy sees it. Times are unix seconds."""

    __tablename__ = "sessions"
    session_id: Mapped[str] = mapped_column(Text, primary_key=True)
    scope: Mapped[str] = mapped_column(CleanText)
    external_id: Mapped[str | None] = mapped_column(CleanText)
    created_at: Mapped[float] = mapped_column(Double)
    last_seen: Mapped[float] = mapped_column(Double)
    closed_at: Mapped[float | None] = mapped_column(Double)
    close_reason: Mapped[str | None] = mapped_column(CleanText)
    __table_args__ = (
        Index(None, "scope", "external_id", unique=True),
        # A client's name for it, in whichever scope.
        Index(None, "external_id"),
        Index(None, "closed_at", "last_seen"),
        # Pages list sessions, newest first.
        Index(None, "created_at", "session_id"),
        Index(None, "scope", "created_at", "session_id"),
    )


class NodeRow(Base):
    """One message at its place in the conversation tree; `body` is the first form seen of it."""

    __tablename__ = "message_nodes"
    node_id: Mapped[str] = mapped_column(Text, primary_key=True)
    scope: Mapped[str] = mapped_column(CleanText)
    parent_id: Mapped[str | None] = mapped_column(Text, ForeignKey("message_nodes.node_id"))
    depth: Mapped[int]
    body_hash: Mapped[str] = mapped_column(Text)
    body: Mapped[Any] = mapped_column(JsonText)
    __table_args__ = (Index(None, "parent_id"),)


class VariantRow(Base):
    """Another form of a message (reasoning kept or dropped, other whitespace), by content hash."""

    __tablename__ = "message_variants"
    body_hash: Mapped[str] = mapped_column(Text, primary_key=True)
    body: Mapped[Any] = mapped_column(JsonText)


class SessionVariantRow(Base):
    """A form that a turn of the session has (`TurnRow.variants`); a trigger adds the row."""

    __tablename__ = "session_variants"
    session_id: Mapped[str] = mapped_column(Text, primary_key=True)
    body_hash: Mapped[str] = mapped_column(Text, primary_key=True, index=True)


class ToolsetRow(Base):
    """The tools that a request offered, stored once per content."""

    __tablename__ = "toolsets"
    toolset_hash: Mapped[str] = mapped_column(Text, primary_key=True)
    body: Mapped[Any] = mapped_column(JsonText)


class TurnRow(Base):
    """One answered request and where it stands.

    `variants` maps a position of the path (prompt messages, then the response) to the form that
    this turn had there, if it is not the node's. `claim_owner` holds the turn until `claim_until`.
    Waiting turns with the lowest `priority` go first. `calls_key` identifies the names and
    arguments of the response's calls; `echo_changes` says how the client showed the response when
    it sent the next state (NULL: as it was sent), see `records.messages.EchoChange`.
    `times_trained` counts the surviving steps that trained it, `times_left` those that may follow
    (records/training/repeats.py).
    """

    __tablename__ = "turns"
    turn_id: Mapped[str] = mapped_column(Text, primary_key=True)
    session_id: Mapped[str] = mapped_column(Text, ForeignKey("sessions.session_id"))
    scope: Mapped[str] = mapped_column(CleanText)
    parent_turn_id: Mapped[str | None] = mapped_column(Text, ForeignKey("turns.turn_id"))
    turn_type: Mapped[TurnType] = mapped_column(enum_column(TurnType))
    state: Mapped[TurnState] = mapped_column(enum_column(TurnState))
    drop_reason: Mapped[DropReason | None] = mapped_column(enum_column(DropReason))
    drop_detail: Mapped[str | None] = mapped_column(CleanText)
    claim_owner: Mapped[str | None] = mapped_column(Text)
    claim_until: Mapped[float | None] = mapped_column(Double)
    prompt_node_id: Mapped[str] = mapped_column(Text, ForeignKey("message_nodes.node_id"))
    response_node_id: Mapped[str] = mapped_column(Text, ForeignKey("message_nodes.node_id"))
    fingerprint: Mapped[str] = mapped_column(Text)
    calls_key: Mapped[str | None] = mapped_column(Text)
    variants: Mapped[Any] = mapped_column(JsonText, nullable=True)
    toolset_hash: Mapped[str | None] = mapped_column(Text, ForeignKey("toolsets.toolset_hash"))
    next_state: Mapped[Any] = mapped_column(JsonText, nullable=True)
    echo_changes: Mapped[str | None] = mapped_column(Text)
    sampling: Mapped[Any] = mapped_column(JsonText)
    distribution_modified: Mapped[str | None] = mapped_column(CleanText)
    version_spans: Mapped[Any] = mapped_column(JsonText)
    oldest_version: Mapped[int | None] = mapped_column(BigInteger)
    newest_version: Mapped[int | None] = mapped_column(BigInteger)
    finish_reason: Mapped[str] = mapped_column(CleanText)
    latency_s: Mapped[float | None] = mapped_column(Double)
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)
    trained_version: Mapped[int | None] = mapped_column(
        BigInteger, ForeignKey("policy_versions.version")
    )
    teacher_key: Mapped[str | None] = mapped_column(CleanText)
    data_source: Mapped[str | None] = mapped_column(CleanText)
    request_echo: Mapped[Any] = mapped_column(JsonText, nullable=True)
    user_id: Mapped[str | None] = mapped_column(CleanText)
    findings: Mapped[Any] = mapped_column(JsonText, nullable=True)
    priority: Mapped[int] = mapped_column(server_default="0")
    times_trained: Mapped[int] = mapped_column(server_default="0")
    times_left: Mapped[int] = mapped_column(server_default="0")
    __table_args__ = (
        Index(None, "state", "priority", "scope", "created_at"),
        Index(None, "session_id", "created_at"),
        # The policy's answers to a prompt, version by version.
        Index(None, "prompt_node_id", "newest_version"),
        Index(None, "response_node_id"),
        Index(None, "scope", "fingerprint", "created_at"),
        Index(None, "scope", "calls_key", "created_at"),
        # A deletion checks what still refers to a row.
        Index(None, "parent_turn_id"),
        Index(None, "toolset_hash"),
        Index(None, "user_id"),
        # At start, and after every step: which versions have sampled anything.
        Index(None, "newest_version"),
        Index(
            "ix_turns_side_scope_created_at",
            "scope",
            "created_at",
            sqlite_where=IS_SIDE_TURN,
            postgresql_where=IS_SIDE_TURN,
        ),
        # Turns that an outcome of their session brings back.
        Index(
            "ix_turns_unsaid_updated_at",
            "updated_at",
            sqlite_where=IS_UNSAID,
            postgresql_where=IS_UNSAID,
        ),
        # What the newest versions trained, when a trainer starts.
        Index(
            "ix_turns_trained_version",
            "trained_version",
            sqlite_where=HAS_TRAINED,
            postgresql_where=HAS_TRAINED,
        ),
        Index(
            "ix_turns_again_scope_created_at",
            "scope",
            "created_at",
            sqlite_where=TRAINS_AGAIN,
            postgresql_where=TRAINS_AGAIN,
        ),
    )


class TurnTextRow(Base):
    """A turn's place in the index of texts (records/search/), in the order in which turns came."""

    __tablename__ = "turn_texts"
    number: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer(), "sqlite"), primary_key=True
    )
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"))
    is_indexed: Mapped[bool]
    __table_args__ = (
        Index(None, "turn_id", unique=True),
        Index(
            "ix_turn_texts_waiting",
            "number",
            sqlite_where=IS_NOT_INDEXED,
            postgresql_where=IS_NOT_INDEXED,
        ),
    )


class RecordingRow(Base):
    """The origin of a turn that did not come through the endpoint; see `Recording`."""

    __tablename__ = "recordings"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    kind: Mapped[RecordingKind] = mapped_column(enum_column(RecordingKind))
    source: Mapped[str] = mapped_column(CleanText)
    position: Mapped[int]
    held_out: Mapped[bool]
    votes: Mapped[Any] = mapped_column(JsonText, nullable=True)


IS_HELD_OUT = exists().where(RecordingRow.turn_id == TurnRow.turn_id, RecordingRow.held_out)
"""Of a row of `turns`: whether it is a recording that is only measured."""


class TokensRow(Base):
    """A turn's tokens.

    Its prompt is the first `num_shared_ids` of the parent's prompt + response, then `prompt_ids`.
    `checksum` identifies the whole prompt + response.
    """

    __tablename__ = "turn_tokens"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    token_parent_id: Mapped[str | None] = mapped_column(Text, ForeignKey("turn_tokens.turn_id"))
    num_shared_ids: Mapped[int]
    prompt_length: Mapped[int]
    response_length: Mapped[int]
    checksum: Mapped[bytes] = mapped_column(LargeBinary)
    prompt_ids: Mapped[Any] = mapped_column(IdsBlob)
    response_ids: Mapped[Any] = mapped_column(IdsBlob)
    rollout_logprobs: Mapped[Any] = mapped_column(LogprobsBlob)
    __table_args__ = (Index(None, "token_parent_id"),)


class ExpertsRow(Base):
    """Where a mixture-of-experts engine sent the tokens of a turn; a separate table, as it is
    large.
    """

    __tablename__ = "routed_experts"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    experts: Mapped[Any] = mapped_column(ExpertsBlob)


class SideSamplesRow(Base):
    """Further tokens at each position of a turn's response: [R, num_samples], row after row."""

    __tablename__ = "side_samples"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    policy_version: Mapped[int] = mapped_column(BigInteger)
    source: Mapped[SideSource] = mapped_column(
        enum_column(SideSource), server_default=SideSource.POLICY
    )
    num_samples: Mapped[int]
    ids: Mapped[Any] = mapped_column(IdsBlob)
    rollout_logprobs: Mapped[Any] = mapped_column(LogprobsBlob)
    teacher_logprobs: Mapped[Any] = mapped_column(LogprobsBlob)
    created_at: Mapped[float] = mapped_column(Double)


class VerdictRow(Base):
    """The judge's decision on a turn; `candidates` is NULL for the selected hint alone. With
    `awaits_outcome`, its session's outcome is its reward.
    """

    __tablename__ = "verdicts"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    hint: Mapped[str | None] = mapped_column(CleanText)
    selection: Mapped[str] = mapped_column(CleanText)
    judge: Mapped[str] = mapped_column(CleanText)
    num_omitted: Mapped[int]
    created_at: Mapped[float] = mapped_column(Double)
    candidates: Mapped[Any] = mapped_column(JsonText, nullable=True)
    reward: Mapped[float | None] = mapped_column(Double)
    awaits_outcome: Mapped[bool] = mapped_column(server_default=false())


class ReviewRow(Base):
    """What a person decided on the hint of a turn: `proposed` by the judge, `hint` now (NULL:
    rejected).
    """

    __tablename__ = "reviews"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    scope: Mapped[str] = mapped_column(CleanText)
    decision: Mapped[ReviewDecision] = mapped_column(enum_column(ReviewDecision))
    proposed: Mapped[str] = mapped_column(CleanText)
    hint: Mapped[str | None] = mapped_column(CleanText)
    author: Mapped[str] = mapped_column(CleanText)
    created_at: Mapped[float] = mapped_column(Double)
    __table_args__ = (Index(None, "scope", "decision"),)


class VoteRow(Base):
    """One judge answer to a turn."""

    __tablename__ = "votes"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    vote_index: Mapped[int] = mapped_column(primary_key=True)
    score: Mapped[int | None]
    hint: Mapped[str] = mapped_column(CleanText)
    text: Mapped[str] = mapped_column(CleanText)
    latency_s: Mapped[float | None] = mapped_column(Double)
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(CleanText)
    rejected: Mapped[HintRejection | None] = mapped_column(enum_column(HintRejection))


class ScoreRow(Base):
    """A teacher's log-probs of a turn under one hint candidate, which its hash identifies.

    The hinted prompt is the turn's prompt with `middle_ids` between its first `prefix_length` and
    its last `suffix_length` ids. Top-k scores are stored position after position. The scores of one
    commit have one `created_at`; an empty `teacher_version` means that no engine scored.
    """

    __tablename__ = "scores"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    hint_hash: Mapped[str] = mapped_column(Text, primary_key=True)
    teacher: Mapped[str] = mapped_column(Text, primary_key=True)
    teacher_version: Mapped[str] = mapped_column(Text, primary_key=True)
    hint: Mapped[str] = mapped_column(CleanText)
    prefix_length: Mapped[int]
    suffix_length: Mapped[int]
    middle_ids: Mapped[Any] = mapped_column(IdsBlob)
    teacher_logprobs: Mapped[Any] = mapped_column(LogprobsBlob)
    latency_s: Mapped[float] = mapped_column(Double)
    created_at: Mapped[float] = mapped_column(Double)
    candidate: Mapped[int] = mapped_column(server_default="0")
    topk_ids: Mapped[Any] = mapped_column(IdsBlob, nullable=True)
    topk_logprobs: Mapped[Any] = mapped_column(LogprobsBlob, nullable=True)


class SampleRow(Base):
    """What training did with a turn in the step that made `version`; the last four columns are
    `TokenFigures`, all of them or none.
    """

    __tablename__ = "samples"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    version: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("policy_versions.version"), primary_key=True
    )
    staleness: Mapped[int]
    advantage_mean: Mapped[float] = mapped_column(Double)
    advantage_abs_max: Mapped[float] = mapped_column(Double)
    advantages: Mapped[Any] = mapped_column(LogprobsBlob)
    created_at: Mapped[float] = mapped_column(Double)
    log_ratios: Mapped[Any] = mapped_column(HalvesBlob, nullable=True)
    weights: Mapped[Any] = mapped_column(HalvesBlob, nullable=True)
    entropies: Mapped[Any] = mapped_column(HalvesBlob, nullable=True)
    engine_gaps: Mapped[Any] = mapped_column(HalvesBlob, nullable=True)
    # The newest trained turns, for reports.
    __table_args__ = (Index(None, "version"),)


class FeedbackRow(Base):
    """What somebody said about a turn: `body` is the message that the judge reads, `reward` the
    score on [-1, 1]. `external_id` is the client's name for it.
    """

    __tablename__ = "feedback"
    feedback_id: Mapped[str] = mapped_column(Text, primary_key=True)
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"))
    scope: Mapped[str] = mapped_column(CleanText)
    external_id: Mapped[str | None] = mapped_column(CleanText)
    body: Mapped[Any] = mapped_column(JsonText)
    reward: Mapped[float | None] = mapped_column(Double)
    outcome: Mapped[FeedbackOutcome] = mapped_column(enum_column(FeedbackOutcome))
    reason: Mapped[str | None] = mapped_column(CleanText)
    created_at: Mapped[float] = mapped_column(Double)
    __table_args__ = (
        Index(None, "turn_id"),
        Index(None, "scope", "external_id", unique=True),
    )


class PolicyVersionRow(Base):
    """One published state of the policy."""

    __tablename__ = "policy_versions"
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    parent_version: Mapped[int | None] = mapped_column(BigInteger)
    checkpoint: Mapped[str] = mapped_column(CleanText)
    manifest_hash: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Double)
    abandoned: Mapped[bool]
    restores: Mapped[int | None] = mapped_column(BigInteger)
