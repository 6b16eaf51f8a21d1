"""An embedding model: vLLM's pooling engine in this process, and its embeddings API over that."""
