"""How vLLM's engine is built, warmed up and stepped."""
