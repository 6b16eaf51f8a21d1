"""How long a newcomer waits: from a fresh clone to the first token and to the first tool call."""
