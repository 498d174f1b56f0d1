"""What this project is made of: the lock, its audit and the bill of materials. Not installed."""
