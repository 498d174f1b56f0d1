"""How much memory a run takes: from the model's configuration and the run's settings alone.

It loads no weights and starts nothing. What a run really takes is measured elsewhere
(benchmarks/memory_plan.py, trainer/step/memory_plan.py).
"""
