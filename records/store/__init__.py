"""The store: what every stage of a run reads and writes, and the only thing that they share.

A thin facade, as long as the list of possible calls, sorted by caller: each write is an operation
(`*_op` of the modules of `records`) that the group writer commits before the method returns; each
read runs on its own connection. Turns move through `TurnState` only here. It decides nothing:
linking, judging, scoring and training are the callers' work.
"""

from __future__ import annotations

from records.store.hints import HintStore
from records.store.inspection import InspectionStore
from records.store.lessons import LessonStore
from records.store.outcomes import OutcomeStore
from records.store.recordings import RecordingStore
from records.store.sessions import SessionStore
from records.store.trainer import TrainerStore
from records.store.turns import TurnStore
from records.store.workers import WorkerStore


class Store(
    SessionStore,
    TurnStore,
    RecordingStore,
    WorkerStore,
    LessonStore,
    TrainerStore,
    HintStore,
    OutcomeStore,
    InspectionStore,
):
    """One process's access to the database. All methods may raise StoreUnavailable."""
