"""Checks each version on the canaries that the user gives, and goes back if one is worse than the
run allows. It trains nothing and uses no hints.
"""
