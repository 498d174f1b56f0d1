"""What each process of a run does: engine, endpoint, judge and trainer."""
