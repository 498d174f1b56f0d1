"""The tables, and how values lie in their columns."""
