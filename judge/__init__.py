"""The judge: votes on turns, and questions about hints. Independent of trainer and endpoint."""
