"""A user's own word on what a session came to: a Python function or a URL, asked once a session is
over. It knows no votes and no hints.
"""
