"""What trains: objectives, batches, steps, checkpoints and publication. It knows no command line
and not where turns come from.
"""
