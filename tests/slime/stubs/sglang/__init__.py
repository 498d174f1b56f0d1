"""The names of sglang that slime's rollout process imports, for machines without sglang.

No engine is started with them: they only let slime's own code be loaded.
"""
