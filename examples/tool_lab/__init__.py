"""The tool lab: a tiny policy, a small world of tools, and users who react in words.

`build_model` builds the model; `domain`, `preferences` and `users` are the world; `agent` talks to
an OpenAI-compatible endpoint; `evaluate` measures what the model does on names it has never seen.
"""
