"""Files of recorded sessions, and what they contain. It knows neither tokens nor the store."""
