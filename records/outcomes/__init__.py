"""What sessions came to in the end, each said once: by a person, a recording or a verifier.

It knows what is stored and who may say it; what an outcome is worth as a reward is the trainer's.
"""
