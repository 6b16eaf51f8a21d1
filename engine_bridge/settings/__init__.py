"""What an engine is started with, and what is known of its machine."""
