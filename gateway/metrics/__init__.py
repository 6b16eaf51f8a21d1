"""Figures for Prometheus, a module a concern."""
