"""The embedded engine: a transformers model behind the engine contract, so that a laptop can run
the whole loop. Only the process that serves it imports torch.
"""
