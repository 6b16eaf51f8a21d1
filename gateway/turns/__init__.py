"""Turns of conversations: how a message becomes an answer, its title, and what clients are told of it."""
