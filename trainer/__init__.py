"""The trainer: objectives, batches, steps, checkpoints and publication. It knows neither the
command line nor where turns come from.
"""
