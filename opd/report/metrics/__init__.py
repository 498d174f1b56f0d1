"""A run's figures in Prometheus' form. Nothing is measured here."""
