"""The HTTP server around the routes: connections, request ids, the event loop."""
