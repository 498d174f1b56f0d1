"""What users run: commands, configuration, processes, replay, evaluation, export, cluster launches.
It imports every other package; none imports it.
"""
