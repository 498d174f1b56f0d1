"""What a run remembers: value types, tables, the store. Imports none of the other packages."""
