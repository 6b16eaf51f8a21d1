"""Pure decisions about KV: which blocks stay, and whether to load or recompute. Facts and `now` in, a decision out."""
