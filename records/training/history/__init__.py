"""Earlier answers to a prompt, and earlier sessions that began alike. It only reads."""
