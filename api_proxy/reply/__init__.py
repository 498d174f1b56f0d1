"""A reply from sampled ids to the client's format, whole or streamed."""
