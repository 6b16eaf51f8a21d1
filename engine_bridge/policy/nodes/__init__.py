"""Which node a request goes to."""
