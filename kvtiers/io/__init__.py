"""Where KV blocks lie: memory and files."""
