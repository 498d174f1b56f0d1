"""What can go wrong between the client and an engine.

EngineError
├── EngineUnavailable    no usable answer: transport errors, timeouts, 5xx, after the retries
├── EngineRejected       the engine refused the request (4xx, or an error event in a stream)
└── EngineProtocolError  the answer breaks the contract: ids, lengths, null or non-finite values
    ├── EngineLogprobError  ids and lengths are right, but a scored log-prob is not a number
    └── ForeignTokens       the ids to score are not all in the engine's vocabulary
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all engine errors."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, timed out, or failed with a 5xx; worth another try later."""


class EngineRejected(EngineError):
    """The engine refused the request: sending it again unchanged would fail again."""

    def __init__(self, status: int, message: str):
        super().__init__(f"engine answered {status}: {message}")
        self.status = status
        self.message = message


class EngineProtocolError(EngineError):
    """The engine's answer cannot be trusted: it breaks the contract. Never padded, never cut."""


class EngineLogprobError(EngineProtocolError):
    """A scored log-prob is null, NaN or infinite, although ids and lengths are right."""


class ForeignTokens(EngineProtocolError):
    """Ids that the engine's vocabulary does not have: no answer can be had for them."""
