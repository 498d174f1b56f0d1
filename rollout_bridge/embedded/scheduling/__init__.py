"""Which requests are computed when."""
