"""A model's own chat template, and what it makes of agents' messages. It knows no tokens."""
