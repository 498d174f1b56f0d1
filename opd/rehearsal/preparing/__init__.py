"""Where a hint is practised: recorded states, tested texts for its exceptions, kept states."""
