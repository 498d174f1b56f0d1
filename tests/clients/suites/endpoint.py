"""An endpoint whose policy says what a test wrote down, and what must be recorded of those who
talked to it. For clients whose prompts the lab's model cannot read.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from records.names import TurnState
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.records.looking import list_turns

LOGGERS = ("api_proxy", "records", "rollout_bridge")


def call(tool: str, **arguments: Any) -> str:
    """A call as the served template writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Endpoint:
    """A running proxy and its parts; `url` is without a path."""

    url: str
    store: Store
    engine: ScriptedEngine
    rendering: Rendering
    warnings: list[logging.LogRecord] = field(default_factory=list)

    def will_say(self, *texts: str) -> None:
        """What the policy says to the next requests, in order."""
        for text in texts:
            ids = self.rendering.tokenizer.encode(text, add_special_tokens=False)
            self.engine.script.append(Line(ids=[*ids, self.rendering.stop_token_ids[0]], chunk=16))

    async def recorded(self) -> list[TurnRecord]:
        """All turns, oldest first."""
        newest_first = await list_turns(self.store, limit=100)
        return await self.store.turns([turn.turn_id for turn in reversed(newest_first)])

    async def check_one_conversation(self, num_turns: int) -> list[TurnRecord]:
        """One session of `num_turns` turns, each but the last with what followed it as its next
        state and free to train; nothing to warn of; and the policy said all it had to say.
        """
        turns = await self.recorded()
        assert not self.engine.script, "the client asked for less than was to be said"
        dropped = [(turn.drop_reason, turn.findings) for turn in turns if turn.drop_reason]
        assert dropped == []
        assert len(turns) == num_turns
        assert len({turn.session_id for turn in turns}) == 1
        for turn, later in pairwise(turns):
            check_joined(turn, later)
        assert turns[-1].state is TurnState.AWAITING_NEXT_STATE
        assert turns[-1].next_state == []
        assert [record.getMessage() for record in self.warnings] == []
        return turns


def check_joined(turn: TurnRecord, later: TurnRecord) -> None:
    """What the client said after `turn` is its next state, and `turn` is on its way to train."""
    assert later.parent_turn_id == turn.turn_id
    assert turn.state is TurnState.JUDGING
    assert turn.next_state
    assert turn.next_state == later.messages[-len(turn.next_state) :]
    assert "assistant" not in {message["role"] for message in turn.next_state}


def results(turn: TurnRecord) -> list[str]:
    """What the tools that `turn` called gave back, as text."""
    return [text_of(message) for message in turn.next_state if message["role"] == "tool"]


def text_of(message: dict[str, Any]) -> str:
    """A message's text, whether it came in parts or not."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
