"""What stays, what moves, load or recompute: pure decisions. No clock, no I/O, no threads: facts and `now` in, a decision out."""
