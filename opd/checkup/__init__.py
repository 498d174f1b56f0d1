"""`opd doctor` without a session: whether a machine and a run's settings are fit to run. It looks
at the environment and queries the judge; it reads no session and changes nothing.
"""
