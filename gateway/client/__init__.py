"""Clients: the chat socket; advisories and hooks for agents. Stands alone: nothing of the server is imported, so load generators can use it."""
