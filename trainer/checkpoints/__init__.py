"""Versions on disk: manifests, weights and optimiser state, written, read back and verified."""
