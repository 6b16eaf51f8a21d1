"""Adapters of one engine: never loaded in a step, cached in memory that KV does not need."""
