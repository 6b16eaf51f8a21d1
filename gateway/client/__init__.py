"""Client of the chat socket. Stands alone: it imports nothing of the server, so agents and load generators can use it."""
