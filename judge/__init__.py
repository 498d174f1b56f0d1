"""The judge: votes on turns, and questions about hints. It knows no trainer and no endpoint."""
