"""vLLM's own scheduler with our driver classes on a device that exists in virtual time only: what serves is what is measured, without noise."""
