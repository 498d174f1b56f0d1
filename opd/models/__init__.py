"""A model as the user names it: is it complete, which renderer fits, do two agree on their ids? It
loads no weights.
"""
