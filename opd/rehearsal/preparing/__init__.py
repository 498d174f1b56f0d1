"""Where a hint is practised: recorded states, tried texts for its exceptions, kept states."""
