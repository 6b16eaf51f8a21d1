"""Measurements: each ends with one line of JSON, and `bench/results` keeps them."""
