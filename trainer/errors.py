"""What can stop training.

StartupError                what a run needs is missing or wrong; shown without a traceback
    ConfigError             a setting is wrong
TrainerError
    CalibrationError        an engine does not compute the trainer's log-probabilities
    CheckpointError         a checkpoint or its manifest is damaged
    DistillationOffError    the distillation term has no gradient, or its metrics are missing
    NonFiniteError          too many non-finite log-probabilities in one batch
"""

from __future__ import annotations


class StartupError(Exception):
    """A run cannot start; the message says what to do."""


class ConfigError(StartupError):
    """The configuration is wrong; the message is one line a key: what, where, what to do."""


class TrainerError(Exception):
    """Training cannot go on."""


class CalibrationError(TrainerError):
    """An engine's log-probabilities differ from the trainer's by more than the bound."""


class CheckpointError(TrainerError):
    """A checkpoint or its manifest is damaged or belongs to another run."""


class DistillationOffError(TrainerError):
    """The distillation signal is silently absent."""


class NonFiniteError(TrainerError):
    """More non-finite log-probabilities than configured."""
