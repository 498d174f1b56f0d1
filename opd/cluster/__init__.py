"""Training on a cluster: from one configuration to a slime job and the processes next to it.

config.py        the section [cluster]: strict, no defaults for what only the user knows
architecture.py  a model's config.json -> Megatron's flags
layout.py        which GPU does what; refuses layouts that do not add up
flags.py         configuration + layout -> the flags of slime's train_async.py
plan.py          everything that a launch would write and run, as values
show.py          the plan as text (--dry-run)
parsers.py       runs in slime's Python: which flags does the installed slime know?
flag_check.py    checks the plan's flags against that answer
launch.py        carries a plan out, and stops what it started
"""
