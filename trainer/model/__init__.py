"""The policy and its teachers as torch modules: log-probs of tokens, adapters, memory. It knows no
loss.
"""
