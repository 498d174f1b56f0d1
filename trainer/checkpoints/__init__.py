"""Versions on disk: their manifests, weights and optimiser state, written, read back and verified.
"""
