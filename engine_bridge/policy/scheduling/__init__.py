"""The order in which requests start, who is preempted, and how steps are paced."""
