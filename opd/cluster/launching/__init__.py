"""A slime job from its start to its end: Ray's nodes, the held job, the processes next to it."""
