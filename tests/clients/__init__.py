"""Clients that others wrote, each in an environment of its own, against a real server: `python -m tests.clients`, or `make clients`."""
