"""Requests that are announced before they come: drafts, what is learned of them, and what they were worth."""
