"""What a command prints while a run goes on: lines, warnings and progress bars."""
