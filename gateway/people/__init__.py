"""People, who own conversations, KV and budgets through their keys: the key file's changes, what people used, what they did, and their end."""
