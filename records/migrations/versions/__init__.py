"""One file per schema revision, oldest first; `records.database.schema.HEAD` names the newest."""
