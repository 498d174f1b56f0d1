"""What the store raises.

    StoreError
    |-- StoreUnavailable   the database cannot be reached or stayed locked; trying again may help
    |-- StoreSchemaError   the database was written by another version of this program
    |-- StoreConflict      what is asked contradicts what is stored; trying again will not help
    |-- StoreCorrupt       stored rows contradict each other
    |-- BackupError        (records.care.backup) a backup cannot be taken, or is not as described
    |-- UnknownKey         no such API key, or it was revoked
    `-- UnknownTurn        no such turn (also a KeyError)

Bad arguments raise ValueError.
"""

from __future__ import annotations


class StoreError(Exception):
    """Anything that goes wrong between the program and its database."""


class StoreUnavailable(StoreError):
    """The database does not answer, or stayed locked for longer than is configured."""


class StoreSchemaError(StoreError):
    """The schema in the database is not one that this program knows."""


class StoreConflict(StoreError):
    """A write contradicts stored facts, for example a version number that is already taken."""


class StoreCorrupt(StoreError):
    """Rows that belong together do not match; nothing computed from them may be used."""


class UnknownKey(StoreError):
    """No API key of this id can be changed."""


class UnknownTurn(StoreError, KeyError):
    """A turn id that the store has never seen."""

    def __str__(self) -> str:
        return f"unknown turn {self.args[0]!r}"
