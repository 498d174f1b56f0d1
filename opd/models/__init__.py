"""A model as somebody names it: is it whole, which renderer fits, do two agree on their ids. It
loads no weights.
"""
