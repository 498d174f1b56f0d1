"""slime's trainer: its hooks, which compute what the embedded trainer computes. They are loaded by
path.
"""
