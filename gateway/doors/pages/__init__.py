"""The pages, and how their scripts and styles are sent."""
