"""What the bridge decides: pure code, without asyncio, torch, vllm, clock or I/O."""
