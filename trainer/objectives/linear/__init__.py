"""Log-probs straight from hidden states and the head, a tile of logits at a time."""
