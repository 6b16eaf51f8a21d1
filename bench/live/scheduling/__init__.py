"""The live bench of who starts next: `python -m bench.live.scheduling`."""
