"""Writing a run's records for people and other programs: JSONL, Parquet, data sets for training.

It only reads the store. What is forgotten there is not in any file written afterwards.
"""
