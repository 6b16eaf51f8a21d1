"""vLLM's KV blocks and the tiers below them."""
