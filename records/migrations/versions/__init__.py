"""One file per schema revision, oldest first; `records.schema.HEAD` names the newest."""
