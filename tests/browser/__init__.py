"""Chromium looks at the pages of a run that has learned: ./run.sh browser."""
