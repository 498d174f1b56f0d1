"""The embedded engine's routes, and texts in place of ids."""
