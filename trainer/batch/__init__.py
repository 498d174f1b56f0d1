"""A batch on its way to one loss: packed tokens, what is known of each turn, sums over all of them.
It takes no step.
"""
