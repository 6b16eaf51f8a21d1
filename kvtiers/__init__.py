"""KV blocks in host memory and on disk."""
