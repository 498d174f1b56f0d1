"""The embedded engine's computations: weights, rows of keys and values, sampling. No HTTP."""
