"""Recorded sessions: read, stored as turns, judged, scored and learned from by the live workers."""
