"""Migrating a database to the schema of this program, by whichever process opens it first.

The check and the migration happen under the write lock (SQLite) or an advisory lock (PostgreSQL),
so that several processes may open a new database at once. Alembic is imported only when there is
work for it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from records.errors import StoreSchemaError

HEAD = "0033"
"""The newest revision in `records/migrations/versions`."""
KNOWN = (
    *("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010"),
    *("0011", "0012", "0013", "0014", "0015", "0016", "0017", "0018", "0019", "0020"),
    *("0021", "0022", "0023", "0024", "0025", "0026", "0027", "0028", "0029", "0030"),
    *("0031", "0032", HEAD),
)
"""Every revision that this program can migrate from, and the newest."""
VERSION_TABLE = "alembic_version"

_ADVISORY_LOCK = 7_203_115_064_981_237


def migrate_op(connection: Connection) -> None:
    """Run the missing migrations. Raises StoreSchemaError for a schema from a newer program."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    revision = current_revision(connection)
    if revision == HEAD:
        return
    check_revision(revision)
    _upgrade(connection)


def problem_of(connection: Connection, error: Exception) -> Exception:
    """`error`, or that the database's schema is not this program's, if that explains it."""
    revision = current_revision(connection)
    if revision == HEAD:
        return error
    try:
        check_revision(revision)
    except StoreSchemaError as newer:
        return newer
    return StoreSchemaError(
        f"the database has schema {revision!r}, older than {HEAD!r}, which this program needs: a "
        "migration is pending; restart the run, which migrates it when it starts"
    )


def check_revision(revision: str | None) -> None:
    """Raise StoreSchemaError for a schema from a newer program."""
    if revision is not None and revision not in KNOWN:
        raise StoreSchemaError(
            f"the database has schema {revision!r}, which this program (schema {HEAD!r}) does not "
            "know: it was written by a newer version; update the program or use another database"
        )


def current_revision(connection: Connection) -> str | None:
    """The revision in the database; None if it has none of our tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    # A percent sign in a path would start an interpolation.
    location = str(Path(__file__).parents[1] / "migrations").replace("%", "%%")
    config.set_main_option("script_location", location)
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
