"""Messages to token ids and sampled ids back to messages, by a model's own template."""
