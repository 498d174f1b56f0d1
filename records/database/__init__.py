"""The database under the store: connections, schema, locks, the one writer. It knows no turns."""
