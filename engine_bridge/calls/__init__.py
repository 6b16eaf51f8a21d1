"""Bodies of API calls before and after vLLM's classes read them. Pure."""
