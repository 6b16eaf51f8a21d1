"""Extensions of vLLM's API classes, where clients expect more than these read and write."""
