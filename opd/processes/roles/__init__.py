"""What each process of a run does: engine, endpoint, judge and trainer. It starts no other."""
