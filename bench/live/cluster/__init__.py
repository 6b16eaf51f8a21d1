"""Two nodes against one, live: `python -m bench.live.cluster`."""
