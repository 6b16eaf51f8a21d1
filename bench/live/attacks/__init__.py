"""Attacks of one client: what each sends, and what it then waits for. Each is bounded in number and time."""
