"""Who may ask, how much at a time, and how large a request may be."""
