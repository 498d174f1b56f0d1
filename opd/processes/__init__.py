"""The processes of a run: what each does, and who starts, watches and stops them."""
