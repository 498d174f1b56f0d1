"""Divergences between student and teacher: sampled tokens, supports of k tokens, whole
vocabularies.
"""
