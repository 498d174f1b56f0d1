"""A run's configuration, its folder and what is checked before it starts. It knows no process that
runs.
"""
