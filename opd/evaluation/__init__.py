"""How good a version is: tasks tried k times, recorded states, two versions compared."""
