"""Pages under `/ui` for people, and the same as JSON: what a run recorded, and what became of it.

They read the store and change nothing except hints. They do not sample, judge or train.
"""
