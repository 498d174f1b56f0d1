"""Files of recorded sessions, and what they contain. It loads neither a tokenizer nor the store."""
