"""What a person runs: commands, configuration, processes, replay, evaluation, export, the cluster's
launch. It knows every other package; none knows it.
"""
