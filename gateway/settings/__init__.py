"""Flags, files and variables: what an operator sets, and where it is read."""
