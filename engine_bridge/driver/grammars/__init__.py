"""Structured output that cannot hurt others: checked before it is queued, bounded while it runs."""
