"""The only package that imports vllm: it builds the engine, steps it, and puts our parts in the places of vLLM's."""
