"""A run's status, for whoever looks at it from another terminal. It only reads, and knows neither
how the figures are made nor how a page shows them.
"""
