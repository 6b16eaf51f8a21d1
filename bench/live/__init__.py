"""Benches of the real engine on this machine."""
