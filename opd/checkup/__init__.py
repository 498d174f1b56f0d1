"""`opd doctor` without a session: whether a machine and a run's settings are fit to run. It looks
at the environment and asks the judge; it knows no session and changes nothing.
"""
