"""Engines under test, each in a process of its own: vLLM keeps process-group state per process, so two in one break each other."""
