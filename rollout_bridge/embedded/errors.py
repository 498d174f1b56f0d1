"""What the embedded engine refuses.

EmbeddedEngineError
├── UnsupportedModel  the model cannot be served here; the message says why
├── WeightsRejected   a weight update was refused; the weights are unchanged
├── AdapterRejected   an adapter was not loaded or unloaded; the loaded ones are unchanged
└── BadRequest        a request was refused before it reached the scheduler
"""

from __future__ import annotations


class EmbeddedEngineError(Exception):
    """Base of the embedded engine's errors."""


class UnsupportedModel(EmbeddedEngineError):
    """The model cannot be served by this engine."""


class WeightsRejected(EmbeddedEngineError):
    """The folder's tensors are not this model's; nothing was changed."""


class AdapterRejected(EmbeddedEngineError):
    """The folder's adapter cannot be served with this model, or the name is taken."""


class BadRequest(EmbeddedEngineError):
    """A request that cannot be served, in words for the client."""
