"""A user's own verifier of session outcomes: a Python function or a URL, asked once a session is
over. Independent of votes and hints.
"""
