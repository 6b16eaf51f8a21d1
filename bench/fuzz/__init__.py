"""Test suites of others, run against us: `make fuzz`."""
