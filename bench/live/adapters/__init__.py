"""Live bench of LoRA adapters, `python -m bench.live.adapters`, and an engine for mixed batches of them."""
