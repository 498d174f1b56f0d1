"""Hints practised on recorded requests: the worker that samples, scores and measures. What the
trainer must know of it is in `trainer.rehearsal`.
"""
