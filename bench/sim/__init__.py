"""Benches in virtual time: our own policies against recorded traffic, without an engine."""
