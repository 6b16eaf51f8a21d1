"""A model that makes embeddings or scores: vLLM's pooling engine in this process, and its APIs over that."""
