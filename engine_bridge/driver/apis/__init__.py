"""What the API classes of vLLM read and write, where clients expect more of it."""
