"""LoRA sums on a CPU."""
