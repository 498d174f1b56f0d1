"""The tables of what was deleted and of what was backed up: they outlive the sessions they name."""

from __future__ import annotations

from sqlalchemy import Double, Text
from sqlalchemy.orm import Mapped, mapped_column

from records.tables.columns import CleanText, JsonText
from records.tables.models import Base


class DeletionRow(Base):
    """A session that was deleted: nothing of it is written again. `reason`: forget or retention.

    `versions` were trained on it; for this and the other two columns see `records.care.lineage`.
    """

    __tablename__ = "deletions"
    session_id: Mapped[str] = mapped_column(Text, primary_key=True)
    deleted_at: Mapped[float] = mapped_column(Double)
    reason: Mapped[str] = mapped_column(Text)
    versions: Mapped[list[int] | None] = mapped_column(JsonText)
    pending_lessons: Mapped[list[str] | None] = mapped_column(JsonText)
    name_digests: Mapped[list[str] | None] = mapped_column(JsonText)


class BackupRow(Base):
    """A backup that was taken, so that it can be named when something in it is to be forgotten."""

    __tablename__ = "backups"
    backup_id: Mapped[str] = mapped_column(Text, primary_key=True)
    location: Mapped[str] = mapped_column(CleanText)
    created_at: Mapped[float] = mapped_column(Double)
