"""Prometheus figures, one module a concern: the gateway itself, nodes and routing, scheduling, KV, adapters."""
