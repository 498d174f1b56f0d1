"""How much memory a run takes: only from the model's configuration and the run's settings.

It loads no weights and starts nothing. What a run actually takes is measured elsewhere
(benchmarks/memory_plan.py, trainer/step/memory_plan.py).
"""
