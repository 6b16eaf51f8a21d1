"""Checks of what a deployment is made of, where the tools for it are missing."""
