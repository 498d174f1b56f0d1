"""The embedded engine's computations: weights, rows of keys and values, sampling. It knows no HTTP.
"""
