"""Overture's own REST API: sessions, advisories, adapters, nodes, health and the page's files."""
