"""When a request is likely to come, and what it is worth to prepare for it: pure decisions. No clock, no I/O: facts and `now` in, an answer out."""
