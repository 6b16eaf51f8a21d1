"""Structured output that cannot hurt other requests: checked before it is queued, bounded while it runs."""
