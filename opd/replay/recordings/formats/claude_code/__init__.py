"""Session logs of Claude Code -> sessions of turns."""
