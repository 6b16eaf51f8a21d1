"""Live benches of KV: where it comes back from, and advisories that bring it."""
