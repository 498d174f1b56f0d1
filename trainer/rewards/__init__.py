"""From scores of answers and of their parts to advantages, and what length costs.

Pure functions of tensors and sequences; they know no model, no judge and no store.
"""
