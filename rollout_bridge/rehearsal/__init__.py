"""Rehearsal: what a hint of the memory teaches is practised on recorded states, with lessons that
keep its exceptions and everything else as they were.
"""
