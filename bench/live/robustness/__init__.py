"""Servers under attack, and servers that are broken while they work."""
