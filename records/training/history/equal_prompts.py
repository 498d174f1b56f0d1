"""When two prompts are the same one."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, and_

from records.tables.models import TokensRow, TurnRow


class EqualPrompt(NamedTuple):
    """What equal prompts have in common: messages and tools of one scope, and the number of tokens,
    because a template may render the same messages in two ways.
    """

    node_id: str
    toolset_hash: str | None
    length: int

    @property
    def key(self) -> str:
        """As one text."""
        return f"{self.node_id}:{self.toolset_hash or ''}:{self.length}"

    def is_of_turn(self) -> ColumnElement[bool]:
        """Of a row of `turns` with its tokens: whether this is its prompt."""
        return and_(
            TurnRow.prompt_node_id == self.node_id,
            TurnRow.toolset_hash.is_not_distinct_from(self.toolset_hash),
            TokensRow.prompt_length == self.length,
        )
