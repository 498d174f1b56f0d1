"""A new version on its way to the engines: as an adapter, or as merged weights."""
