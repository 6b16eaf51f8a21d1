"""What people of a team put out for each other: links to conversations, read-only, and presets of new ones."""
