"""Attacks on a server, each of which enters itself into `attacker.CASES`."""

from bench.live.robustness.attacks import bodies, connections, grammars, sockets  # noqa: F401 - for their cases
