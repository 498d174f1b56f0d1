"""What a request asks for, checked."""
