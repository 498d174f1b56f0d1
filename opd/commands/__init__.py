"""What the commands on a run's records do: keys, hints, maintenance of the records, the doctor. It
starts no processes.
"""
