"""Which conversation a request continues, and what of it is known as token ids."""
