"""The processes of a run: who starts, watches and stops them. What each does is in roles/."""
