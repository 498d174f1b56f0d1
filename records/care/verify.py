"""Whether a database is whole: schema, pages, references, checksums, the rules of the states.

It reads one snapshot and changes nothing, even on a database in use. Each finding is a line that
says what is wrong and with which turns. Checkpoints are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    and_,
    cast,
    exists,
    func,
    or_,
    select,
    text,
    true,
    type_coerce,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import InstrumentedAttribute

from records.config import StoreConfig
from records.database import schema
from records.database.database import readers
from records.database.opening import unavailable
from records.errors import StoreCorrupt, StoreError, StoreUnavailable
from records.lessons import verifying
from records.names import TurnState
from records.outcomes.rows import OutcomeRow
from records.tables.columns import content_hash
from records.tables.loading import load_tokens
from records.tables.models import (
    Base,
    FeedbackRow,
    NodeRow,
    PolicyVersionRow,
    SampleRow,
    SessionRow,
    SessionVariantRow,
    TokensRow,
    ToolsetRow,
    TurnRow,
    VariantRow,
    VerdictRow,
)
from records.tables.sql import chunks
from records.tables.totals import total_problems
from records.training.repeats import has_times_left, is_taught
from records.turns.recording import REPLAY_PRIORITY

_SHOWN = 3
_BATCH = 200
_CLAIMED = (TurnState.JUDGING, TurnState.SCORING, TurnState.LEASED)


async def verify_database(config: StoreConfig) -> list[str]:
    """The problems, one line each; empty if there are none. Raises StoreUnavailable."""
    path = config.sqlite_path
    if path is not None and not path.is_file():
        raise StoreUnavailable(f"no database: {path}")
    connections = readers(config.patient())
    try:
        return await connections.run(_verify)
    except (SQLAlchemyError, OSError) as error:
        raise unavailable(error, config) from error
    finally:
        await connections.close()


def _verify(connection: Connection) -> list[str]:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")
    else:
        connection.execution_options(isolation_level="REPEATABLE READ")
    problems = _schema_problems(connection)
    if problems:
        return problems
    if connection.dialect.name == "sqlite":
        problems += _page_problems(connection)
    problems += _reference_problems(connection)
    problems += _state_problems(connection)
    problems += _body_problems(connection)
    problems += _form_problems(connection)
    problems += _token_problems(connection)
    problems += _sample_problems(connection)
    problems += _outcome_problems(connection)
    problems += total_problems(connection)
    problems += verifying.state_problems(connection)
    problems += verifying.token_problems(connection)
    return problems


def _schema_problems(connection: Connection) -> list[str]:
    revision = schema.current_revision(connection)
    if revision == schema.HEAD:
        return []
    if revision is None:
        return ["the database has no tables of this program"]
    if revision in schema.KNOWN:
        return [
            f"the database has schema {revision!r}, this program {schema.HEAD!r}: "
            "start the run once, which migrates it, then verify again"
        ]
    return [f"the database has schema {revision!r}, which this program does not know: update it"]


def _page_problems(connection: Connection) -> list[str]:
    rows = connection.scalars(text("PRAGMA integrity_check(20)"))
    return [f"integrity check: {row}" for row in rows if row != "ok"]


def _reference_problems(connection: Connection) -> Iterator[str]:
    """Rows that refer to missing rows: a database forbids them, but damage can cause them."""
    for table, column, missing in _references():
        if number := connection.scalar(missing):
            yield f"{number} rows of {table} refer to a {column} that does not exist"


@cache
def _references() -> list[tuple[str, str, Select[Any]]]:
    """Tables, their columns that refer to others, and how many of their rows refer to nothing."""
    made = []
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            target = key.column.table.alias("target")
            column = key.parent
            found = exists().where(target.c[key.column.name] == column)
            missing = select(func.count()).select_from(table).where(column.is_not(None), ~found)
            made.append((table.name, column.name, missing))
    return made


def _state_problems(connection: Connection) -> Iterator[str]:
    for what, condition, count in _state_counts():
        if number := connection.scalar(count):
            some = select(TurnRow.turn_id).where(condition).order_by(TurnRow.turn_id).limit(_SHOWN)
            yield f"{number} turns {what}: {_some(list(connection.scalars(some)), number)}"


@cache
def _state_counts() -> list[tuple[str, ColumnElement[bool], Select[Any]]]:
    """The rules of the states, and how many turns break each."""
    count = select(func.count()).select_from(TurnRow)
    return [(what, condition, count.where(condition)) for what, condition in _state_rules()]


def _training_rules() -> list[tuple[str, ColumnElement[bool]]]:
    """What no turn may be that has trained or not, in words and as a condition."""
    trained = TurnRow.state == TurnState.TRAINED
    is_repeated = and_(TurnRow.state == TurnState.LEASED, TurnRow.times_trained > 0)
    version = exists().where(PolicyVersionRow.version == TurnRow.trained_version)
    return [
        ("are trained in no version", and_(trained, TurnRow.trained_version.is_(None))),
        (
            "have a version but are not trained",
            and_(~trained, ~is_repeated, TurnRow.trained_version.is_not(None)),
        ),
        ("are trained, but in no step", and_(trained, TurnRow.times_trained < 1)),
        (
            "were trained in steps, but are not trained",
            and_(~trained, ~is_repeated, TurnRow.times_trained > 0),
        ),
        (
            "may train again, but never did",
            and_(has_times_left(TurnRow), TurnRow.times_trained < 1),
        ),
        (
            "are trained in an abandoned version",
            and_(trained, version.where(PolicyVersionRow.abandoned.is_(True))),
        ),
    ]


def _state_rules() -> list[tuple[str, ColumnElement[bool]]]:
    """What no turn may be, in words and as a condition."""
    state, owner, until = TurnRow.state, TurnRow.claim_owner, TurnRow.claim_until
    dropped = state == TurnState.DROPPED
    verdict = exists().where(VerdictRow.turn_id == TurnRow.turn_id)
    feedback = exists().where(FeedbackRow.turn_id == TurnRow.turn_id)
    session = exists().where(
        SessionRow.session_id == TurnRow.session_id, SessionRow.scope == TurnRow.scope
    )
    # A turn without a hint has a reward, or its session's outcome gives one.
    reward = or_(VerdictRow.reward.is_not(None), VerdictRow.awaits_outcome)
    rewarded = and_(TurnRow.priority == REPLAY_PRIORITY, reward)
    return [
        ("are dropped without a reason", and_(dropped, TurnRow.drop_reason.is_(None))),
        (
            "have a drop reason but are not dropped",
            and_(~dropped, TurnRow.drop_reason.is_not(None)),
        ),
        *_training_rules(),
        ("have an owner without a deadline", and_(owner.is_not(None), until.is_(None))),
        ("have a deadline without an owner", and_(owner.is_(None), until.is_not(None))),
        ("are leased to nobody", and_(state == TurnState.LEASED, owner.is_(None))),
        (
            "have an owner in a state that has none",
            and_(state.not_in(_CLAIMED), owner.is_not(None)),
        ),
        (
            "wait for their next state and have one",
            and_(state == TurnState.AWAITING_NEXT_STATE, TurnRow.next_state.is_not(None)),
        ),
        (
            "wait for a judgement without a next state or feedback",
            and_(state == TurnState.JUDGING, TurnRow.next_state.is_(None), ~feedback),
        ),
        (
            "wait for a score without a hint",
            # A recording may have only a reward: the policy has yet to score it.
            and_(
                state == TurnState.SCORING,
                ~verdict.where(or_(VerdictRow.hint.is_not(None), rewarded)),
            ),
        ),
        (
            "wait for a person without a hint",
            and_(state == TurnState.REVIEWING, ~verdict.where(VerdictRow.hint.is_not(None))),
        ),
        (
            "can be trained on without a score or a reward",
            and_(state.in_((TurnState.READY, TurnState.LEASED)), ~is_taught(TurnRow)),
        ),
        ("have no tokens", ~exists().where(TokensRow.turn_id == TurnRow.turn_id)),
        ("are in another scope than their session", ~session),
    ]


def _sample_problems(connection: Connection) -> Iterator[str]:
    """Samples whose numbers are not one for each token of the answer."""
    number = TokensRow.response_length
    halves = (SampleRow.log_ratios, SampleRow.entropies, SampleRow.engine_gaps)
    weights = _num_bytes(SampleRow.weights)
    none = and_(*(column.is_(None) for column in (*halves, SampleRow.weights)))
    right = and_(
        *(_num_bytes(column) == 2 * number for column in halves),
        or_(weights == 2 * number, weights == 2),
    )
    wrong = or_(
        _num_bytes(SampleRow.advantages) != 4 * number, ~or_(none, func.coalesce(right, False))
    )
    found = (
        select(SampleRow.turn_id)
        .join(TokensRow, TokensRow.turn_id == SampleRow.turn_id)
        .where(wrong)
        .order_by(SampleRow.turn_id)
    )
    bad = list(connection.scalars(found))
    if bad:
        yield f"{len(bad)} samples do not have a number for each token: {_some(bad, len(bad))}"


def _num_bytes(column: InstrumentedAttribute[Any]) -> ColumnElement[int]:
    return func.length(type_coerce(column, LargeBinary))


def _outcome_problems(connection: Connection) -> Iterator[str]:
    """Outcomes that are not from 0 to 1, or that are known but still asked for or given up."""
    wrong = or_(
        OutcomeRow.value < 0,
        OutcomeRow.value > 1,
        and_(OutcomeRow.value.is_not(None), OutcomeRow.failure.is_not(None)),
        and_(OutcomeRow.value.is_not(None), OutcomeRow.claim_owner.is_not(None)),
    )
    number = connection.scalar(select(func.count()).select_from(OutcomeRow).where(wrong))
    if number:
        yield f"{number} outcomes of sessions are not from 0 to 1, or are known but still asked for"


def _body_problems(connection: Connection) -> Iterator[str]:
    """Messages and tools whose content does not match their hash."""
    for name, key, body in (
        ("messages", NodeRow.body_hash, NodeRow.body),
        ("message variants", VariantRow.body_hash, VariantRow.body),
        ("toolsets", ToolsetRow.toolset_hash, ToolsetRow.body),
    ):
        bad = []
        for found, value in connection.execute(
            select(key, body).execution_options(yield_per=_BATCH)
        ):
            if content_hash(value) != found:
                bad.append(found)
        if bad:
            yield f"{len(bad)} {name} do not match their hash: {_some(bad, len(bad))}"


def _form_problems(connection: Connection) -> Iterator[str]:
    """Turns with a form of a message that their session does not name: forgetting another session
    could delete it."""
    if connection.dialect.name == "sqlite":
        form = func.json_each(TurnRow.variants).table_valued("value")
    else:
        form = func.json_each_text(cast(TurnRow.variants, JSON)).table_valued("key", "value")
    named = exists().where(
        SessionVariantRow.session_id == TurnRow.session_id,
        SessionVariantRow.body_hash == form.c.value,
    )
    found = (
        select(TurnRow.turn_id)
        .join(form, true())
        .where(TurnRow.variants.is_not(None), ~named)
        .distinct()
        .order_by(TurnRow.turn_id)
    )
    if bad := list(connection.scalars(found)):
        yield (
            f"{len(bad)} turns have a form of a message that session_variants does not name: "
            f"{_some(bad, len(bad))}"
        )


def _token_problems(connection: Connection) -> Iterator[str]:
    """Turns whose ids cannot be rebuilt, or are not those that were recorded."""
    turn_ids = list(connection.scalars(select(TokensRow.turn_id).order_by(TokensRow.turn_id)))
    for part in chunks(turn_ids, _BATCH):
        lengths = {
            row.turn_id: (row.prompt_length, row.response_length)
            for row in connection.execute(
                select(TokensRow.turn_id, TokensRow.prompt_length, TokensRow.response_length).where(
                    TokensRow.turn_id.in_(part)
                )
            )
        }
        if _batch_problem(connection, part, lengths) is None:
            continue
        for turn_id in part:
            problem = _batch_problem(connection, [turn_id], lengths)
            if problem is not None:
                yield problem


def _batch_problem(
    connection: Connection, turn_ids: Sequence[str], lengths: dict[str, tuple[int, int]]
) -> str | None:
    try:
        for turn_id, (prompt, response, logprobs) in load_tokens(connection, turn_ids).items():
            if (len(prompt), len(response)) != lengths[turn_id] or len(logprobs) != len(response):
                raise StoreCorrupt(f"turn {turn_id}: the lengths of its tokens are not as recorded")
    except (StoreError, ValueError, KeyError) as error:
        return str(error) if isinstance(error, StoreCorrupt) else f"turn {turn_ids[0]}: {error!r}"
    return None


def _some(values: list[Any], number: int) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + (", ..." if number > _SHOWN else "")
