"""Which waiting request starts next, and what a step may hold."""
