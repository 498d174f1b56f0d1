"""Which conversation a request continues, and which part of it is known as token ids."""
