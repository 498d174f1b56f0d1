"""What the commands on a run's records do: keys, hints, care of the records, the doctor. It starts
no processes.
"""
