"""The request of `opd records export`, from the words of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias, TypeVar, get_args

from records.names import TurnState
from records.reading.exporting import Wanted
from trainer.errors import StartupError

What: TypeAlias = Literal["sessions", "votes", "hints", "samples"]
FileFormat: TypeAlias = Literal["jsonl", "parquet"]
Dataset: TypeAlias = Literal["sft", "taught", "preference"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to write. With `dataset` it is a data set, and `what` and `file_format` are ignored."""

    wanted: Wanted
    what: tuple[What, ...]
    file_format: FileFormat
    dataset: Dataset | None
    with_ids: bool


def read_request(
    *,
    what: str,
    file_format: str,
    dataset: str | None,
    since: str | None,
    session: str | None,
    states: Sequence[str],
    with_ids: bool,
) -> ExportRequest:
    """The request. Raises StartupError for an unknown word."""
    if dataset is not None and states:
        raise StartupError("--state: a data set chooses its turns itself; leave it out")
    return ExportRequest(
        wanted=Wanted(
            since=None if since is None else _time(since),
            session=session,
            states=frozenset(
                TurnState(_one_of("--state", state, list(TurnState))) for state in states
            ),
        ),
        what=tuple(
            dict.fromkeys(
                _one_of("--what", word.strip(), get_args(What)) for word in what.split(",")
            )
        ),
        file_format=_one_of("--format", file_format, get_args(FileFormat)),
        dataset=None if dataset is None else _one_of("--dataset", dataset, get_args(Dataset)),
        with_ids=with_ids,
    )


def _one_of(option: str, word: str, known: Sequence[T]) -> T:
    for one in known:
        if one == word:
            return one
    raise StartupError(f"{option}: {word!r} is not one of {', '.join(map(str, known))}")


def _time(text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise StartupError(
            f"--since: {text!r} is not a date; write 2026-05-01 or 2026-05-01T12:00:00 (UTC)"
        ) from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
