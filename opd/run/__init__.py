"""A run's configuration, its folder and what is checked before it starts. It depends on no running
process.
"""
