"""The first schema: conversation tree, turns and tokens, judgement, scores, training."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    _create_conversation()
    _create_policy_versions()
    _create_turns()
    _create_tokens()
    _create_judgement()
    _create_scores()
    _create_samples()


def downgrade() -> None:
    """Drop every table, the referring ones first."""
    for table in (
        "samples",
        "scores",
        "votes",
        "verdicts",
        "turn_tokens",
        "turns",
        "policy_versions",
        "toolsets",
        "message_variants",
        "message_nodes",
        "sessions",
    ):
        op.drop_table(table)


def _text(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _integer(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.Integer(), nullable=nullable)


def _version(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=nullable)


def _double(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.Double(), nullable=nullable)


def _bytes(name: str) -> sa.Column:
    return sa.Column(name, sa.LargeBinary(), nullable=False)


def _enum(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.String(32), nullable=nullable)


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _refers(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [target], name=f"fk_{table}_{column}")


def _index(table: str, *columns: str, unique: bool = False) -> None:
    op.create_index(f"ix_{table}_{'_'.join(columns)}", table, list(columns), unique=unique)


def _create_conversation() -> None:
    op.create_table(
        "sessions",
        _text("session_id"),
        _text("scope"),
        _text("external_id", nullable=True),
        _double("created_at"),
        _double("last_seen"),
        _double("closed_at", nullable=True),
        _text("close_reason", nullable=True),
        _key("sessions", "session_id"),
    )
    _index("sessions", "scope", "external_id", unique=True)
    _index("sessions", "closed_at", "last_seen")
    op.create_table(
        "message_nodes",
        _text("node_id"),
        _text("scope"),
        _text("parent_id", nullable=True),
        _integer("depth"),
        _text("body_hash"),
        _text("body"),
        _key("message_nodes", "node_id"),
        _refers("message_nodes", "parent_id", "message_nodes.node_id"),
    )
    op.create_table(
        "message_variants",
        _text("body_hash"),
        _text("body"),
        _key("message_variants", "body_hash"),
    )
    op.create_table(
        "toolsets", _text("toolset_hash"), _text("body"), _key("toolsets", "toolset_hash")
    )


def _create_policy_versions() -> None:
    op.create_table(
        "policy_versions",
        _version("version"),
        _version("parent_version", nullable=True),
        _text("checkpoint"),
        _text("manifest_hash"),
        _double("created_at"),
        sa.Column("abandoned", sa.Boolean(), nullable=False),
        _key("policy_versions", "version"),
    )


def _create_turns() -> None:
    op.create_table(
        "turns",
        _text("turn_id"),
        _text("session_id"),
        _text("scope"),
        _text("parent_turn_id", nullable=True),
        _enum("turn_type"),
        _enum("state"),
        _enum("drop_reason", nullable=True),
        _text("drop_detail", nullable=True),
        _text("claim_owner", nullable=True),
        _double("claim_until", nullable=True),
        _text("prompt_node_id"),
        _text("response_node_id"),
        _text("fingerprint"),
        _text("variants", nullable=True),
        _text("toolset_hash", nullable=True),
        _text("next_state", nullable=True),
        _text("sampling"),
        _text("distribution_modified", nullable=True),
        _text("version_spans"),
        _version("oldest_version", nullable=True),
        _version("newest_version", nullable=True),
        _text("finish_reason"),
        _double("latency_s"),
        _double("created_at"),
        _double("updated_at"),
        _version("trained_version", nullable=True),
        _key("turns", "turn_id"),
        _refers("turns", "session_id", "sessions.session_id"),
        _refers("turns", "parent_turn_id", "turns.turn_id"),
        _refers("turns", "prompt_node_id", "message_nodes.node_id"),
        _refers("turns", "response_node_id", "message_nodes.node_id"),
        _refers("turns", "toolset_hash", "toolsets.toolset_hash"),
        _refers("turns", "trained_version", "policy_versions.version"),
    )
    _index("turns", "state", "created_at")
    _index("turns", "session_id", "created_at")
    _index("turns", "prompt_node_id")
    _index("turns", "response_node_id")
    _index("turns", "scope", "fingerprint", "created_at")


def _create_tokens() -> None:
    op.create_table(
        "turn_tokens",
        _text("turn_id"),
        _text("token_parent_id", nullable=True),
        _integer("num_shared_ids"),
        _integer("prompt_length"),
        _integer("response_length"),
        _bytes("checksum"),
        _bytes("prompt_ids"),
        _bytes("response_ids"),
        _bytes("rollout_logprobs"),
        _key("turn_tokens", "turn_id"),
        _refers("turn_tokens", "turn_id", "turns.turn_id"),
        _refers("turn_tokens", "token_parent_id", "turn_tokens.turn_id"),
    )


def _create_judgement() -> None:
    op.create_table(
        "verdicts",
        _text("turn_id"),
        _text("hint", nullable=True),
        _text("selection"),
        _text("judge"),
        _integer("num_omitted"),
        _double("created_at"),
        _key("verdicts", "turn_id"),
        _refers("verdicts", "turn_id", "turns.turn_id"),
    )
    op.create_table(
        "votes",
        _text("turn_id"),
        _integer("vote_index"),
        _integer("score", nullable=True),
        _text("hint"),
        _text("text"),
        _double("latency_s"),
        _integer("prompt_tokens", nullable=True),
        _integer("completion_tokens", nullable=True),
        _text("error", nullable=True),
        _key("votes", "turn_id", "vote_index"),
        _refers("votes", "turn_id", "turns.turn_id"),
    )


def _create_scores() -> None:
    op.create_table(
        "scores",
        _text("turn_id"),
        _text("hint_hash"),
        _text("teacher"),
        _text("teacher_version"),
        _text("hint"),
        _integer("prefix_length"),
        _integer("suffix_length"),
        _bytes("middle_ids"),
        _bytes("teacher_logprobs"),
        _double("latency_s"),
        _double("created_at"),
        _key("scores", "turn_id", "hint_hash", "teacher", "teacher_version"),
        _refers("scores", "turn_id", "turns.turn_id"),
    )


def _create_samples() -> None:
    op.create_table(
        "samples",
        _text("turn_id"),
        _version("version"),
        _integer("staleness"),
        _double("advantage_mean"),
        _double("advantage_abs_max"),
        _bytes("advantages"),
        _double("created_at"),
        _key("samples", "turn_id", "version"),
        _refers("samples", "turn_id", "turns.turn_id"),
        _refers("samples", "version", "policy_versions.version"),
    )
