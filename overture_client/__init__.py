"""Clients of an Overture server: the chat socket, `overture chat`, and advisories and hooks for agents.

The package is a distribution of its own, `overture-client`, and imports nothing of the server. The server's distribution depends on it.
"""

# The version of both distributions, kept here alone: their pyproject.toml files and the server read it.
__version__ = "0.2.0"
