"""Checks each version on the canaries that the user gives, and goes back where one is worse than
the run allows. It trains nothing, and knows no hints.
"""
