"""The tables, and how values are stored in their columns."""
