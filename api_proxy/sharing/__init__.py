"""What the worker processes of one endpoint share, so that it does not matter which one answers."""
