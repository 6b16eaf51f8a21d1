"""The order in which requests start, which of them are preempted, and how steps are paced."""
