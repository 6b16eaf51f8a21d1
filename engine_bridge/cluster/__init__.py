"""Nodes in processes of their own: what crosses between them and the gateway, and both ends of it."""
