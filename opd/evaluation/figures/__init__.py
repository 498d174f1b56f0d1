"""How often k tries solve a problem, and how many tries an estimate needs.

Pure functions of counts; they depend on no model and no benchmark.
"""
