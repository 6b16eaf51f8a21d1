"""vLLM's serving classes on the event loop: a call from its start to its last event."""
