"""The outcomes of sessions, each given once: by a person, a recording or a verifier.

It knows what is stored and who may give it; the trainer decides what an outcome is worth as a
reward.
"""
