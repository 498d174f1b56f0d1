"""A batch on its way to one loss: packed tokens, what is known about each turn, sums over all
turns. It takes no step.
"""
