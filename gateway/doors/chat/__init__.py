"""The door of the chat page and of `overture chat`: frames over a websocket or as server-sent events."""
