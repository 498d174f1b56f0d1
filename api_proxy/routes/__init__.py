"""The routes: chat completions, texts, models, feedback, hints."""
