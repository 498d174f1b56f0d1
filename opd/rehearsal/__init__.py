"""Hints practised on recorded requests: the worker that samples, scores and measures. What the
trainer must know about it is in `rollout_bridge.rehearsal`.
"""
